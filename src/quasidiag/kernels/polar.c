/* Orthogonal factors by Newton-Schulz on Gram matrices (quasidiag.orthogonal.by_gram is the oracle):
 *
 *     G = X X^T,   P_k = a_k + b_k G_k + c_k G_k^2,   G_{k+1} = G_k P_k^2,   P Q^T = P_4 P_3 P_2 P_1 X.
 *
 * Products of our own for the sake of what a library cannot know: all but the last are of symmetric matrices that commute,
 * so that half of a result tells the rest, and the many small ones follow each other without a call. A tile of a result
 * stays in registers; every number is summed in the same order on any number of threads.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "native.h"

/* A tile is ROWS x WIDTH: 16 of AVX-512's 32 registers, 8 of AVX2's 16. DEPTH x WIDTH numbers fit into
 * a first-level cache. */
#ifdef __AVX512F__
enum { LANES = 16, ROWS = 8 };
#else
enum { LANES = 8, ROWS = 4 };
#endif
enum { WIDTH = 2 * LANES, DEPTH = 192, LINE = 16, AT_ONCE = 1 << 22 };

typedef float vector __attribute__((vector_size(4 * LANES)));

typedef struct {
    float of[ROWS][WIDTH] __attribute__((aligned(64)));
} tile;

/* `count` matrices of g rows and n >= g columns. Square ones have as many rows as fill tiles, with zeros at the end, and
 * columns that fill panels; their rows lie `stride` apart: not a power of two, which few lines of a cache could hold. */
typedef struct {
    int64_t count, g, n, row, column; /* the last two: how far apart a matrix's rows and columns lie */
    int64_t panels, side, stride, size;
    const float *x;
    float *packed, *gram, *p, *product, *spare, *most, *bound;
} problem;

/* t <- (more: t +) x^T y, of `k` rows each. Not inlined, because there the compiler may run out of registers. */
__attribute__((noinline)) static void multiply(int64_t k, const float *x, int64_t xs, const float *y, int64_t ys,
                                               int more, tile *t) {
    vector sum[ROWS][2];
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++)
        for (int h = 0; h < 2; h++) sum[i][h] = more ? *(vector *)&t->of[i][h * LANES] : (vector){0};
#pragma GCC unroll 4
    for (int64_t s = 0; s < k; s++, x += xs, y += ys) {
        const vector left = *(const vector *)y, right = *(const vector *)(y + LANES);
#pragma GCC unroll 16
        for (int i = 0; i < ROWS; i++) {
            sum[i][0] += x[i] * left;
            sum[i][1] += x[i] * right;
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++)
        for (int h = 0; h < 2; h++) *(vector *)&t->of[i][h * LANES] = sum[i][h];
}

/* Where a tile belongs in a symmetric matrix, and its mirror image. What lies below the diagonal is not written as
 * such: another tile has it. */
static void keep(const tile *t, float *c, int64_t side, int64_t stride, int64_t row, int64_t column) {
    const int64_t there = least(WIDTH, side - column);
    if (column >= row + ROWS) {
        for (int64_t i = 0; i < ROWS; i++) memcpy(c + (row + i) * stride + column, t->of[i], sizeof t->of[i]);
        for (int64_t j = 0; j < there; j++)
            for (int64_t i = 0; i < ROWS; i++) c[(column + j) * stride + row + i] = t->of[i][j];
        return;
    }
    for (int64_t i = 0; i < ROWS; i++) {
        const int64_t diagonal = row + i > column ? row + i - column : 0;
        memcpy(c + (row + i) * stride + column + diagonal, t->of[i] + diagonal, (WIDTH - diagonal) * sizeof(float));
        for (int64_t j = diagonal + 1; j < there; j++) c[(column + j) * stride + row + i] = t->of[i][j];
    }
}

/* Of every matrix: c <- x^T y, which is symmetric, of `k` rows each, and those of the next matrix `next` numbers on; with
 * a polynomial's coefficients a + b y + c x^T y, for x and y the same symmetric matrix. */
static void products(const problem *m, int64_t k, int64_t next, const float *x, const float *y, float *c,
                     const float *polynomial) {
    const int64_t stride = m->stride, depth = parts(k, parts(k, DEPTH));
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < m->count * m->panels; i++) {
        const int64_t which = i % m->count, column = (m->panels - 1 - i / m->count) * WIDTH; /* long ones first */
        const int64_t rows = least(m->side, column + WIDTH);
        const float *left = x + which * next, *right = y + which * next + column;
        tile tiles[rows / ROWS];
        for (int64_t s = 0; s < k; s += depth)
            for (int64_t row = 0; row < rows; row += ROWS)
                multiply(least(depth, k - s), left + s * stride + row, stride, right + s * stride, stride, s > 0,
                         tiles + row / ROWS);
        for (int64_t row = 0; row < rows; row += ROWS) {
            tile *t = tiles + row / ROWS;
            for (int64_t r = 0; polynomial && r < ROWS; r++) {
                const float *linear = right + (row + r) * stride;
#pragma omp simd
                for (int64_t j = 0; j < WIDTH; j++) t->of[r][j] = polynomial[2] * t->of[r][j] + polynomial[1] * linear[j];
                if (row + r >= column) t->of[r][row + r - column] += polynomial[0];
            }
            keep(t, c + which * m->size, m->side, stride, row, column);
        }
    }
}

/* A panel of `rows` rows, `stride` apart: `by` times the columns that are there, then zeros. The numbers lie next to each
 * other by rows or by columns. */
static void take(float *to, int64_t stride, const float *from, int64_t row, int64_t column, int64_t rows,
                 int64_t there, float by) {
    if (column == 1)
        for (int64_t r = 0; r < rows; r++, to += stride, from += row) {
#pragma omp simd
            for (int64_t j = 0; j < there; j++) to[j] = by * from[j];
            for (int64_t j = there; j < WIDTH; j++) to[j] = 0;
        }
    else
        for (int64_t first = 0; first < rows; first += LINE, to += LINE * stride, from += LINE) {
            const int64_t few = least(LINE, rows - first);
            for (int64_t j = 0; j < WIDTH; j++)
                for (int64_t r = 0; r < few; r++) to[r * stride + j] = j < there ? by * from[r + j * column] : 0;
        }
}

/* The largest entry of each panel of rows. */
static void look(const problem *m) {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < m->count * m->panels; i++) {
        const int64_t which = i / m->panels, first = i % m->panels * WIDTH, last = least(first + WIDTH, m->g);
        const int64_t across = m->column == 1; /* along what lies next to each other */
        const float *x = m->x + which * m->g * m->n;
        float most = 0;
        for (int64_t a = across ? first : 0; a < (across ? last : m->n); a++) {
            const float *line = x + a * (across ? m->row : m->column);
#pragma omp simd reduction(max : most)
            for (int64_t b = across ? 0 : first; b < (across ? m->n : last); b++)
                most = fabsf(line[b]) > most ? fabsf(line[b]) : most;
        }
        m->most[i] = most;
    }
}

/* What brings the largest entry of a matrix to one: the squares of a gradient that has faded underflow. */
static float scale(const problem *m, int64_t which) {
    float most = 0;
    for (int64_t i = which * m->panels; i < (which + 1) * m->panels; i++) most = m->most[i] > most ? m->most[i] : most;
    return most > 0 ? 1 / most : 0;
}

/* X^T, panel by panel. */
static void pack(const problem *m) {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < m->count * m->panels; i++) {
        const int64_t which = i / m->panels, first = i % m->panels * WIDTH;
        take(m->packed + which * m->n * m->stride + first, m->stride, m->x + which * m->g * m->n + first * m->row,
             m->column, m->row, m->n, least(WIDTH, m->g - first), scale(m, which));
    }
}

/* The bound on the eigenvalues, from G^2 in `spare`; G is divided by it. The first polynomial, and the product so far. */
static void begin(const problem *m, const float *polynomial, float margin) {
#pragma omp for schedule(static)
    for (int64_t which = 0; which < m->count; which++) {
        double sum = 0;
        for (int64_t r = 0; r < m->side; r++) {
            const float *square = m->spare + which * m->size + r * m->stride;
            float part = 0;
#pragma omp simd reduction(+ : part)
            for (int64_t j = 0; j < m->side; j++) part += square[j] * square[j];
            sum += part;
        }
        const float bound = margin * margin * (float)sqrt(sqrt(sum));
        m->bound[which] = bound < 1 ? 1 : bound; /* less than one is a matrix of zeros */
    }
#pragma omp for schedule(static)
    for (int64_t i = 0; i < m->count * m->side; i++) {
        const int64_t which = i / m->side, r = i % m->side, at = which * m->size + r * m->stride;
        const float by = 1 / m->bound[which];
        float *gram = m->gram + at, *p = m->p + at, *product = m->product + at;
        const float *square = m->spare + at;
#pragma omp simd
        for (int64_t j = 0; j < m->panels * WIDTH; j++) {
            gram[j] *= by;
            p[j] = polynomial[1] * gram[j] + polynomial[2] * by * by * square[j];
        }
        p[r] += polynomial[0];
        memcpy(product, p, m->panels * WIDTH * sizeof(float));
    }
}

/* out <- (product) X. */
static void finish(const problem *m, float *out) {
    const int64_t panels = parts(m->n, WIDTH), depth = parts(m->g, parts(m->g, DEPTH));
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < m->count * panels; i++) {
        const int64_t which = i / panels, first = i % panels * WIDTH, there = least(WIDTH, m->n - first);
        const int64_t at = which * m->g * m->n + first * m->column;
        const float *x = m->x + at, by = scale(m, which) / sqrtf(m->bound[which]);
        tile tiles[parts(m->g, ROWS)];
        float panel[DEPTH * WIDTH] __attribute__((aligned(64)));
        for (int64_t s = 0; s < m->g; s += depth) {
            const int64_t k = least(depth, m->g - s);
            take(panel, WIDTH, x + s * m->row, m->row, m->column, k, there, by);
            for (int64_t row = 0; row < m->g; row += ROWS)
                multiply(k, m->product + which * m->size + s * m->stride + row, m->stride, panel, WIDTH, s > 0,
                         tiles + row / ROWS);
        }
        for (int64_t r = 0; r < m->g; r++) {
            const float *row = tiles[r / ROWS].of[r % ROWS];
            float *to = out + at + r * m->row;
            if (m->column == 1)
                memcpy(to, row, there * sizeof(float));
            else
                for (int64_t j = 0; j < there; j++) to[j * m->column] = row[j];
        }
    }
}

/* Returns 0 and does nothing if there is no room. A matrix's rows are g, and lie `row` apart; its columns `column`. */
int qd_polar(int64_t count, int64_t g, int64_t n, int64_t row, int64_t column, const float *x, float *out,
             const float *polynomials, int64_t iterations, float margin, int threads) {
    const int64_t panels = parts(g, WIDTH), side = parts(g, ROWS) * ROWS;
    const int64_t stride = (panels * WIDTH / LINE | 1) * LINE, size = side * stride;
    const int64_t each = n * stride + 4 * size + parts(panels + 1, LINE) * LINE;
    const int64_t many = least(count, each < AT_ONCE ? AT_ONCE / each : 1);
    room *mine = borrow(many * each);
    if (!mine) return 0;
#pragma omp parallel num_threads(worth(count * g * n, threads))
    {
        const unsigned before = flush_denormals();
        for (int64_t start = 0; start < count; start += many) {
            const int64_t here = least(many, count - start);
            problem m = {here, g, n, row, column, panels, side, stride, size, x + start * g * n};
            m.packed = mine->numbers;
            m.gram = m.packed + here * n * stride;
            m.p = m.gram + here * size;
            m.product = m.p + here * size;
            m.spare = m.product + here * size;
            m.most = m.spare + here * size;
            m.bound = m.most + here * panels;
            look(&m);
            pack(&m);
            products(&m, n, n * stride, m.packed, m.packed, m.gram, NULL);
            products(&m, side, size, m.gram, m.gram, m.spare, NULL);
            begin(&m, polynomials, margin);
            for (int64_t k = 1; k < iterations; k++) {
                float *product = m.product;
                products(&m, side, size, m.gram, m.p, m.spare, NULL);
                products(&m, side, size, m.spare, m.p, m.gram, NULL);
                products(&m, side, size, m.gram, m.gram, m.p, polynomials + 3 * k);
                products(&m, side, size, m.p, m.product, m.spare, NULL);
                m.product = m.spare;
                m.spare = product;
            }
            finish(&m, out + start * g * n);
        }
        restore(before);
    }
    give_back(mine);
    return 1;
}
