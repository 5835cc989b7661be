/* The direction of a layer: A^{-1} P Q^T for a gradient with the coordinates P S Q^T (quasidiag.auto.orthogonal,
 * quasidiag.root). */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "orthogonal.h"

/* Matrices are worked on together up to this many numbers for each thread, about what its cache holds; larger ones one by
 * one. */
enum { AT_ONCE = 1 << 18 };

/* Matrices go to one thread each if the heaviest is less than this many times a thread's share of all work. */
static const double EVEN = 1.4;

/* The root of a metric (quasidiag.root.Root); bias and mean may be NULL. */
typedef struct {
    int64_t n, first; /* number of inputs, and index of the first among a unit's coordinates: 1 with a bias, else 0 */
    const float *bias, *mean, *scale;
} root;

/* Layers of one shape, each of `groups` groups of units; the same as _Alike in native.py. Arrays may be NULL.
 *
 * If there are gradients g, these are first taken into the averages v, and the slope along the directions is found. */
typedef struct {
    int64_t layers, units, n, groups;
    float *v0, *vi;
    const float *g0, *gi, *bias, *mean, *scale;
    float *w0, *wi;
    float shortest, by, new, factor;
    double slope;
} alike;

/* u <- A^{-T} v of unit k; returns its largest absolute entry. */
static float coordinates(const root *a, int64_t k, const alike *of, float *u) {
    const float *v = of->vi + k * a->n, *s = a->scale + k * a->n, *mu = a->mean ? a->mean + k * a->n : NULL;
    float *to = u + a->first, by = a->first ? of->v0[k] : 0, most = 0;
    if (of->gi) {
        average(a->n, of->vi + k * a->n, of->gi + k * a->n, to, of->new, of->factor);
        v = to;
        if (a->first) average(1, of->v0 + k, of->g0 + k, &by, of->new, of->factor);
    }
    if (mu)
#pragma omp simd
        for (int64_t i = 0; i < a->n; i++) to[i] = (v[i] - mu[i] * by) * s[i];
    else
#pragma omp simd
        for (int64_t i = 0; i < a->n; i++) to[i] = v[i] * s[i];
    if (a->first) *u = by * a->bias[k];
#pragma omp simd reduction(max : most)
    for (int64_t i = 0; i < a->n + a->first; i++) most = fabsf(u[i]) > most ? fabsf(u[i]) : most;
    return most;
}

/* w <- by A^{-1} u of unit k, where u is first divided by its length, or by `shortest` if that is larger (not if
 * `shortest` is 0). Returns the slope along w, 0 without gradients. */
static float back(const root *a, int64_t k, const alike *of, const float *u) {
    const float *from = u + a->first, *s = a->scale + k * a->n, *mu = a->mean ? a->mean + k * a->n : NULL;
    float *w = of->wi + k * a->n, sum = 0, slope = 0, by = of->by;
    if (of->shortest > 0) {
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < a->n + a->first; i++) sum += u[i] * u[i];
        const float length = sqrtf(sum);
        by /= length > of->shortest ? length : of->shortest;
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
    if (a->first) of->w0[k] = by * *u * a->bias[k] - sum;
    if (!of->gi) return 0;
    const float *g = of->gi + k * a->n;
#pragma omp simd reduction(+ : slope)
    for (int64_t i = 0; i < a->n; i++) slope += g[i] * w[i];
    return a->first ? slope + of->g0[k] * of->w0[k] : slope;
}

/* The matrices of alike layers: how one is made orthogonal, how many there are, and about how many multiplications each
 * takes. */
typedef struct {
    alike *of;
    root a;
    problem one;
    int64_t rows, count, own, each; /* own: floats of one matrix, and one for each row; each: with its workspace */
    double work;
    float *slopes; /* one for each unit */
} kind;

static kind kind_of(alike *of, int64_t poles, int factors) {
    kind k = {.of = of, .a = {of->n, of->bias != NULL, of->bias, of->mean, of->scale}};
    const int64_t inputs = of->n + k.a.first;
    k.rows = parts(of->units, of->groups);
    k.count = of->layers * of->groups;
    k.one = k.rows > inputs ? plan(inputs, k.rows, 1, inputs, poles, factors)
                            : plan(k.rows, inputs, inputs, 1, poles, factors);
    k.own = parts(k.rows * inputs + k.rows, LINE) * LINE;
    k.each = k.own + k.one.each;
    k.work = (double)k.one.g * k.one.g * (1.5 * k.one.n + 0.5 * poles * k.one.g);
    return k;
}

/* How many matrices of a kind this many threads work on together. */
static int64_t at_once(const kind *k, int hands) {
    const int64_t most = (int64_t)hands * AT_ONCE;
    return least(k->count, k->each < most ? most / k->each : 1);
}

/* The index, among the units of all layers, of row `i` among the rows of all groups; -1 for padding in a layer's last
 * group. */
static int64_t unit(int64_t i, int64_t rows, int64_t groups, int64_t units) {
    const int64_t layer = i / (rows * groups), k = i % (rows * groups);
    return k < units ? layer * units + k : -1;
}

/* The directions of `count` matrices of a kind, from `start` on. All threads of a team call it together. */
static void directions(const kind *k, int64_t start, int64_t count, float *numbers, const rational *r) {
    const alike *of = k->of;
    const int64_t inputs = of->n + k->a.first;
    problem m = k->one;
    m.count = count;
    m.x = numbers;
    m.most = m.x + count * k->rows * inputs;
    m.units = k->rows;
    m.packed = numbers + count * k->own;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < count * k->rows; i++) {
        const int64_t u = unit(start * k->rows + i, k->rows, of->groups, of->units);
        if (u < 0) memset(m.x + i * inputs, 0, inputs * sizeof(float));
        m.most[i] = u < 0 ? 0 : coordinates(&k->a, u, of, m.x + i * inputs);
    }
    orthogonalise(m, r);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < count * k->rows; i++) {
        const int64_t u = unit(start * k->rows + i, k->rows, of->groups, of->units);
        if (u >= 0) k->slopes[u] = back(&k->a, u, of, m.x + i * inputs);
    }
}

static int heavier(const void *x, const void *y) {
    const double a = ((const kind *)x)->work, b = ((const kind *)y)->work;
    return (a < b) - (a > b);
}

/* Every matrix by one thread, the heavy ones first: no thread needs what is in another's cache. */
static void apart(const kind *kinds, int64_t matrices, float *numbers, int64_t each, const rational *r) {
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < matrices; i++) {
        const kind *k = kinds;
        int64_t which = i;
        while (which >= k->count) which -= k++->count;
        float *mine = numbers + thread() * each;
#pragma omp parallel num_threads(1) /* a team of its own, for the loops inside */
        directions(k, which, 1, mine, r);
    }
}

/* All threads work on one kind after the other, on as many matrices at once as at_once says. */
static void together(const kind *kinds, int64_t count, float *numbers, const rational *r) {
    for (const kind *k = kinds; k < kinds + count; k++) {
        const int64_t many = at_once(k, team());
        for (int64_t start = 0; start < k->count; start += many)
            directions(k, start, least(many, k->count - start), numbers, r);
    }
}

/* Finds the directions of all layers. Returns 0 and does nothing if memory runs out. */
int qd_directions(int64_t count, alike *layers, float whole, const float *numerators, const float *shifts,
                  int64_t poles, int factors, int threads) {
    const rational r = {whole, numerators, shifts};
    kind kinds[count];
    int64_t matrices = 0, numbers = 0, most = 0, least_room = 0, units = 0;
    double total = 0, heaviest = 0;
    for (int64_t i = 0; i < count; i++) {
        const kind k = kinds[i] = kind_of(layers + i, poles, factors);
        matrices += k.count;
        numbers += k.count * k.own;
        units += k.of->layers * k.of->units;
        total += k.count * k.work;
        if (k.work > heaviest) heaviest = k.work;
        if (k.each > most) most = k.each;
    }
    qsort(kinds, count, sizeof *kinds, heavier);
    const int hands = worth(numbers, threads), even = hands > 1 && heaviest * hands < EVEN * total;
    for (int64_t i = 0; i < count; i++) {
        const int64_t room_for = at_once(kinds + i, hands) * kinds[i].each;
        if (room_for > least_room) least_room = room_for;
    }
    const int64_t taken = even ? hands * most : least_room;
    room *mine = borrow(taken + units);
    if (!mine) return 0;
    float *slopes = mine->numbers + taken;
    for (kind *k = kinds; k < kinds + count; slopes += k->of->layers * k->of->units, k++) k->slopes = slopes;
#pragma omp parallel num_threads(hands)
    {
        const unsigned before = flush_denormals();
        if (even)
            apart(kinds, matrices, mine->numbers, most, &r);
        else
            together(kinds, count, mine->numbers, &r);
        restore(before);
    }
    for (kind *k = kinds; k < kinds + count; k++) {
        k->of->slope = 0;
        for (int64_t u = 0; u < k->of->layers * k->of->units; u++) k->of->slope += k->slopes[u];
    }
    give_back(mine);
    return 1;
}
