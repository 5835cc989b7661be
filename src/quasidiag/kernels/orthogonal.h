/* Finds the orthogonal factors of many matrices of one shape at once. */
#include "native.h"

/* A tile is ROWS x WIDTH: 16 of AVX-512's 32 registers, 8 of AVX2's 16. DEPTH x WIDTH numbers fit into
 * a first-level cache. Matrices are inverted by BLOCK rows at a time. */
#ifdef __AVX512F__
enum { LANES = 16, ROWS = 8 };
#else
enum { LANES = 8, ROWS = 4 };
#endif
enum { WIDTH = 2 * LANES, DEPTH = 192, LINE = 16, BLOCK = LINE };
#if defined __AVX512F__ && __GNUC__ >= 10
#define BF16
#endif
#if defined BF16 && defined __linux__ && __GNUC__ >= 11 && !defined NO_AMX
#define AMX
#endif
/* Smaller matrices gain nothing from bfloat16. */
enum { FEW = 64 };

/* The factors of products: floats, pairs of bfloat16 (AVX512_BF16), or tiles of such pairs (AMX). */
enum { FLOATS, PAIRS, TILES };

/* `count` matrices of g rows and n >= g columns. The g x g matrices are padded with zeros, their rows to fill tiles and
 * their columns to fill panels. Their rows lie `stride` apart, no power of two: those would compete for few lines of the
 * cache. Of symmetric ones the part below the diagonal is not used. */
typedef struct {
    int64_t count, poles, g, n, row, column; /* the last two: how far apart the rows and columns of x lie */
    int64_t units; /* how many of the numbers in `most`, absolute entries, the largest one of a matrix is among */
    int64_t panels, side, stride, size, room, each; /* the last two: of one matrix, its packed floats and all its workspace */
    int factors; /* FLOATS, PAIRS or TILES */
    float *x, *packed, *gram, *shifted, *rows, *most, *bound, *counts; /* the last: factor of each inverse in the sum */
} problem;

/* The sum of matrices that X is multiplied by: whole I + sum_j parts[j] (G + shifts[j])^{-1}. */
typedef struct {
    float whole;
    const float *parts, *shifts;
} rational;

/* Whether this processor can multiply such factors. */
int qd_multiplies(int factors);

/* The factors that it multiplies fastest: AMD's have no tiles, and Intel's are slower with pairs than with floats. */
int qd_fastest(void);

/* The sizes for matrices of g rows and n columns, which lie `row` and `column` apart. */
problem plan(int64_t g, int64_t n, int64_t row, int64_t column, int64_t poles, int factors);

/* X <- P Q^T of every matrix. All threads of a team call it together. */
void orthogonalise(problem m, const rational *r);

/* The factor that makes the largest entry of a matrix 1, because the squares of a very small gradient would underflow. */
float scale(const problem *m, int64_t which);

/* Writes rows and columns of a block to their place among those of a matrix. */
void put(const problem *m, float *x, float (*block)[WIDTH], int64_t rows, int64_t columns);

/* tiles.c: whether this processor multiplies tiles, the workspace that a matrix needs for its own, and what orthogonalise()
 * does with them. */
int tiled(void);
int64_t words_of_tiles(int64_t g, int64_t n);
void pack_tiles(const problem *m);
void square_tiles(const problem *m);
void couple_tiles(const problem *m);
void finish_tiles(const problem *m);
