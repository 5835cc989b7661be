/* Matrices that are made orthogonal, all that are alike at once. */
#include "native.h"

/* A tile is ROWS x WIDTH: 16 of AVX-512's 32 registers, 8 of AVX2's 16. DEPTH x WIDTH numbers fit into
 * a first-level cache. Matrices are inverted by BLOCK rows at a time. */
#ifdef __AVX512F__
enum { LANES = 16, ROWS = 8 };
#else
enum { LANES = 8, ROWS = 4 };
#endif
enum { WIDTH = 2 * LANES, DEPTH = 192, LINE = 16, BLOCK = LINE };

/* `count` matrices of g rows and n >= g columns. Square ones have as many rows as fill tiles, with zeros at the end, and
 * columns that fill panels; their rows lie `stride` apart: not a power of two, which few lines of a cache could hold. Of
 * symmetric ones what lies below the diagonal is not looked at. */
typedef struct {
    int64_t count, poles, g, n, row, column; /* the last two: how far apart a matrix's rows and columns lie */
    int64_t panels, side, stride, size, each; /* the last: numbers that a matrix takes */
    float *x, *packed, *gram, *shifted, *rows, *most, *bound, *counts; /* the last: of each inverse, in the sum */
} problem;

/* Which matrices to add up: `whole` times the identity, and `parts` of the inverses of G + `shifts`. */
typedef struct {
    float whole;
    const float *parts, *shifts;
} rational;

/* Of each matrix, how many numbers it takes to make it orthogonal. */
problem plan(int64_t g, int64_t n, int64_t row, int64_t column, int64_t poles);

/* X <- P Q^T. For all threads of a team together. */
void orthogonalise(problem m, const rational *r);
