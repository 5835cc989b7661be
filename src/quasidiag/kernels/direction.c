/* A layer's direction, A^{-1} P Q^T for a gradient with the coordinates P S Q^T (quasidiag.orthogonal, quasidiag.root).
 *
 * The orthogonal factor comes by Newton-Schulz on the Gram matrix (by_gram is the oracle):
 *
 *     G = X X^T,   P_k = a_k + b_k G_k + c_k G_k^2,   G_{k+1} = G_k P_k^2,   P Q^T = P_4 P_3 P_2 P_1 X.
 *
 * Products of our own for the sake of what a library cannot know: most are of symmetric matrices that commute, so that
 * half of a result tells the rest, and the many small ones follow each other without a call. That of the P_k is formed
 * whole, and in this order: where X has nothing it is large, and what rounding leaves of the commutator would be seen. A
 * tile of a result stays in registers; every number is summed in the same order on any number of threads.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
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

/* Matrices go to one thread each if none is heavier than a thread's share of all by more than this. */
static const double EVEN = 1.4;

typedef float vector __attribute__((vector_size(4 * LANES)));

typedef struct {
    float of[ROWS][WIDTH] __attribute__((aligned(64)));
} tile;

/* `count` matrices of g rows and n >= g columns. Square ones have as many rows as fill tiles, with zeros at the end, and
 * columns that fill panels; their rows lie `stride` apart: not a power of two, which few lines of a cache could hold. */
typedef struct {
    int64_t count, g, n, row, column; /* the last two: how far apart a matrix's rows and columns lie */
    int64_t panels, side, stride, size, each; /* the last: numbers that a matrix takes */
    float *x, *packed, *gram, *p, *product, *spare, *most, *bound;
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

/* How a result is written: a symmetric one from its upper half, another one whole, as it is or transposed. */
typedef enum { SYMMETRIC, WHOLE, TRANSPOSED } form;

/* A tile goes where it belongs. Of a symmetric matrix what lies below the diagonal is the image of what lies above, which
 * another tile has. */
static void keep(const tile *t, float *c, int64_t side, int64_t stride, int64_t row, int64_t column, form how) {
    const int64_t there = least(WIDTH, side - column);
    for (int64_t i = 0; i < ROWS; i++) {
        const int64_t below = how == SYMMETRIC && row + i > column ? row + i - column : 0;
        if (how != TRANSPOSED)
            memcpy(c + (row + i) * stride + column + below, t->of[i] + below, (WIDTH - below) * sizeof(float));
    }
    if (how == WHOLE) return;
    for (int64_t j = 0; j < there; j++) {
        const int64_t last = how == TRANSPOSED ? ROWS : least(ROWS, column + j - row);
        for (int64_t i = 0; i < last; i++) c[(column + j) * stride + row + i] = t->of[i][j];
    }
}

/* Of every matrix: c <- x^T y, of `k` rows each, and those of the next matrix `next` numbers on; with a polynomial's
 * coefficients a + b y + c x^T y, for x and y the same symmetric matrix. */
static void products(const problem *m, int64_t k, int64_t next, const float *x, const float *y, float *c,
                     const float *polynomial, form how) {
    const int64_t stride = m->stride, depth = parts(k, parts(k, DEPTH));
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < m->count * m->panels; i++) {
        const int64_t which = i % m->count, column = (m->panels - 1 - i / m->count) * WIDTH; /* long ones first */
        const int64_t rows = how == SYMMETRIC ? least(m->side, column + WIDTH) : m->side;
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
            keep(t, c + which * m->size, m->side, stride, row, column, how);
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

/* X <- (product) X, the product transposed. */
static void finish(const problem *m) {
    const int64_t panels = parts(m->n, WIDTH), depth = parts(m->g, parts(m->g, DEPTH));
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < m->count * panels; i++) {
        const int64_t which = i / panels, first = i % panels * WIDTH, there = least(WIDTH, m->n - first);
        const int64_t at = which * m->g * m->n + first * m->column;
        float *x = m->x + at;
        const float by = scale(m, which) / sqrtf(m->bound[which]);
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
            float *to = x + r * m->row;
            if (m->column == 1)
                memcpy(to, row, there * sizeof(float));
            else
                for (int64_t j = 0; j < there; j++) to[j * m->column] = row[j];
        }
    }
}

/* Of each matrix, how many numbers it takes to make it orthogonal. */
static problem plan(int64_t g, int64_t n, int64_t row, int64_t column) {
    problem m = {.g = g, .n = n, .row = row, .column = column, .panels = parts(g, WIDTH)};
    m.side = parts(g, ROWS) * ROWS;
    m.stride = (m.panels * WIDTH / LINE | 1) * LINE;
    m.size = m.side * m.stride;
    m.each = n * m.stride + 4 * m.size + parts(m.panels + 1, LINE) * LINE;
    return m;
}

/* X <- P Q^T. For all threads of a team together. */
static void orthogonalise(problem m, const float *polynomials, int64_t iterations, float margin) {
    m.gram = m.packed + m.count * m.n * m.stride;
    m.p = m.gram + m.count * m.size;
    m.product = m.p + m.count * m.size;
    m.spare = m.product + m.count * m.size;
    m.most = m.spare + m.count * m.size;
    m.bound = m.most + m.count * m.panels;
    look(&m);
    pack(&m);
    products(&m, m.n, m.n * m.stride, m.packed, m.packed, m.gram, NULL, SYMMETRIC);
    products(&m, m.side, m.size, m.gram, m.gram, m.spare, NULL, SYMMETRIC);
    begin(&m, polynomials, margin);
    for (int64_t k = 1; k < iterations; k++) {
        float *product = m.product;
        products(&m, m.side, m.size, m.gram, m.p, m.spare, NULL, SYMMETRIC);
        products(&m, m.side, m.size, m.spare, m.p, m.gram, NULL, SYMMETRIC);
        products(&m, m.side, m.size, m.gram, m.gram, m.p, polynomials + 3 * k, SYMMETRIC);
        products(&m, m.side, m.size, m.p, m.product, m.spare, NULL, k + 1 < iterations ? WHOLE : TRANSPOSED);
        m.product = m.spare;
        m.spare = product;
    }
    finish(&m);
}

/* The root of a metric; what a unit does not have is NULL. */
typedef struct {
    int64_t n, first; /* inputs, and where they begin among its coordinates: behind the bias, if there is one */
    const float *bias, *mean, *scale;
} root;

/* u <- A^{-T} v of unit k. */
static void coordinates(const root *a, int64_t k, const float *v0, const float *vi, float *u) {
    const float *v = vi + k * a->n, *s = a->scale + k * a->n, *mu = a->mean ? a->mean + k * a->n : NULL;
    float *to = u + a->first;
    if (a->first) *u = v0[k] * a->bias[k];
    if (mu) {
        const float by = v0[k];
#pragma omp simd
        for (int64_t i = 0; i < a->n; i++) to[i] = (v[i] - mu[i] * by) * s[i];
    } else
#pragma omp simd
        for (int64_t i = 0; i < a->n; i++) to[i] = v[i] * s[i];
}

/* w <- A^{-1} u of unit k, with u brought to length one unless it is shorter than `shortest`, or `by` times as long. */
static void back(const root *a, int64_t k, const float *u, float shortest, float by, float *w0, float *wi) {
    const float *from = u + a->first, *s = a->scale + k * a->n, *mu = a->mean ? a->mean + k * a->n : NULL;
    float *w = wi + k * a->n, sum = 0;
    if (shortest > 0) {
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < a->n + a->first; i++) sum += u[i] * u[i];
        const float length = sqrtf(sum);
        by = 1 / (length > shortest ? length : shortest);
        sum = 0;
    }
    if (mu)
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < a->n; i++) {
            w[i] = by * from[i] * s[i];
            sum += mu[i] * w[i];
        }
    else
#pragma omp simd
        for (int64_t i = 0; i < a->n; i++) w[i] = by * from[i] * s[i];
    if (a->first) w0[k] = by * *u * a->bias[k] - sum;
}

/* Layers that are alike, by `groups` groups of units each; native.py has the same. What a layer does not have is NULL. */
typedef struct {
    int64_t layers, units, n, groups;
    const float *v0, *vi, *bias, *mean, *scale;
    float *w0, *wi;
    float shortest, by;
} alike;

/* Their matrices: how one is made orthogonal, how many there are, and about how many multiplications each takes. */
typedef struct {
    const alike *of;
    root a;
    problem one;
    int64_t rows, count, own, each; /* the last two: numbers of a matrix itself, and of all that it takes */
    double work;
} kind;

static kind kind_of(const alike *of) {
    kind k = {.of = of, .a = {of->n, of->bias != NULL, of->bias, of->mean, of->scale}};
    const int64_t inputs = of->n + k.a.first;
    k.rows = parts(of->units, of->groups);
    k.count = of->layers * of->groups;
    k.one = k.rows > inputs ? plan(inputs, k.rows, 1, inputs) : plan(k.rows, inputs, inputs, 1);
    k.own = parts(k.rows * inputs, LINE) * LINE;
    k.each = k.own + k.one.each;
    k.work = (double)k.one.g * k.one.g * (1.5 * k.one.n + 6.5 * k.one.g);
    return k;
}

/* So many of its matrices have room at once. */
static int64_t at_once(const kind *k) { return least(k->count, k->each < AT_ONCE ? AT_ONCE / k->each : 1); }

/* Which unit of all layers is row `i` of all groups; -1 where a layer's last group has none any more. */
static int64_t unit(int64_t i, int64_t rows, int64_t groups, int64_t units) {
    const int64_t layer = i / (rows * groups), k = i % (rows * groups);
    return k < units ? layer * units + k : -1;
}

/* The directions of `count` matrices of a kind, from `start` on. For all threads of a team together. */
static void directions(const kind *k, int64_t start, int64_t count, float *numbers, const float *polynomials,
                       int64_t iterations, float margin) {
    const alike *of = k->of;
    const int64_t inputs = of->n + k->a.first;
    problem m = k->one;
    m.count = count;
    m.x = numbers;
    m.packed = m.x + count * k->own;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < count * k->rows; i++) {
        const int64_t u = unit(start * k->rows + i, k->rows, of->groups, of->units);
        if (u < 0)
            memset(m.x + i * inputs, 0, inputs * sizeof(float));
        else
            coordinates(&k->a, u, of->v0, of->vi, m.x + i * inputs);
    }
    orthogonalise(m, polynomials, iterations, margin);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < count * k->rows; i++) {
        const int64_t u = unit(start * k->rows + i, k->rows, of->groups, of->units);
        if (u >= 0) back(&k->a, u, m.x + i * inputs, of->shortest, of->by, of->w0, of->wi);
    }
}

static int heavier(const void *x, const void *y) {
    const double a = ((const kind *)x)->work, b = ((const kind *)y)->work;
    return (a < b) - (a > b);
}

/* Every matrix by one thread, the heavy ones first: none has to wait for what another has in its cache. */
static void apart(const kind *kinds, int64_t matrices, float *numbers, int64_t each, const float *polynomials,
                  int64_t iterations, float margin) {
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < matrices; i++) {
        const kind *k = kinds;
        int64_t which = i;
        while (which >= k->count) which -= k++->count;
        float *mine = numbers + thread() * each;
#pragma omp parallel num_threads(1) /* a team of its own, for the loops inside */
        directions(k, which, 1, mine, polynomials, iterations, margin);
    }
}

/* All threads at one kind after the other, with as many matrices at once as there is room for. */
static void together(const kind *kinds, int64_t count, float *numbers, const float *polynomials, int64_t iterations,
                     float margin) {
    for (const kind *k = kinds; k < kinds + count; k++) {
        const int64_t many = at_once(k);
        for (int64_t start = 0; start < k->count; start += many)
            directions(k, start, least(many, k->count - start), numbers, polynomials, iterations, margin);
    }
}

/* Of all layers. Returns 0 and does nothing if there is no room. */
int qd_directions(int64_t count, const alike *layers, const float *polynomials, int64_t iterations, float margin,
                  int threads) {
    kind kinds[count];
    int64_t matrices = 0, numbers = 0, most = 0, least_room = 0;
    double total = 0, heaviest = 0;
    for (int64_t i = 0; i < count; i++) {
        const kind k = kinds[i] = kind_of(layers + i);
        const int64_t room_for = at_once(&k) * k.each;
        matrices += k.count;
        numbers += k.count * k.own;
        total += k.count * k.work;
        if (k.work > heaviest) heaviest = k.work;
        if (k.each > most) most = k.each;
        if (room_for > least_room) least_room = room_for;
    }
    qsort(kinds, count, sizeof *kinds, heavier);
    const int hands = worth(numbers, threads), even = hands > 1 && heaviest * hands < EVEN * total;
    room *mine = borrow(even ? hands * most : least_room);
    if (!mine) return 0;
#pragma omp parallel num_threads(hands)
    {
        const unsigned before = flush_denormals();
        if (even)
            apart(kinds, matrices, mine->numbers, most, polynomials, iterations, margin);
        else
            together(kinds, count, mine->numbers, polynomials, iterations, margin);
        restore(before);
    }
    give_back(mine);
    return 1;
}
