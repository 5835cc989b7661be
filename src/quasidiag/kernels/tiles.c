/* The products of orthogonal.c on a processor that multiplies whole tiles of bfloat16 (AMX).
 *
 * A tile has LANES rows of LANES words. In a left factor a row is a row of the matrix, in a right one it is a pair of rows,
 * and a word has two numbers that are multiplied by those of a word of the other: so one is the other's transpose.
 */
#include "orthogonal.h"

#ifdef AMX
#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "words.h"

#define TILED __attribute__((target("amx-tile,amx-bf16,avx512bf16")))

/* Words of a tile, and the numbers in one of its rows. */
enum { TILE = LANES * LANES, NUMBERS = 2 * LANES };

/* Lets a thread use its eight tiles. */
TILED static void configure(void) {
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } of = {.palette = 1};
    for (int i = 0; i < 8; i++) of.bytes[i] = 4 * LANES, of.rows[i] = LANES;
    __asm__ volatile("" ::"r"(&of) : "memory"); /* GCC takes it that the next line reads eight bytes of them */
    _tile_loadconfig(&of);
}

/* c <- x y, of WIDTH x WIDTH numbers whose rows lie `cs` apart, where x is `depth` tiles of two blocks of rows, which lie
 * `xs` apart, and y as many of two blocks of columns. */
TILED static void multiply_tiles(int64_t depth, const float *x, int64_t xs, const float *y, float *c,
                                 int64_t cs) {
    enum { BYTES = 4 * LANES };
    __asm__ volatile("" ::: "memory"); /* GCC takes it that loads of tiles read no memory */
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t s = 0; s < depth; s++, x += TILE, y += 2 * TILE) {
        _tile_loadd(4, x, BYTES);
        _tile_loadd(6, y, BYTES);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, y + TILE, BYTES);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, x + xs, BYTES);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, 4 * cs);
    _tile_stored(1, c + LANES, 4 * cs);
    _tile_stored(2, c + LANES * cs, 4 * cs);
    _tile_stored(3, c + LANES * cs + LANES, 4 * cs);
}

/* Whether a process that multiplies tiles survives it, and with the right result: what a processor says of itself is not
 * always what a virtual machine lets it do. */
TILED static int multiplies(void) {
    int *right = mmap(NULL, sizeof *right, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (right == MAP_FAILED) return 0;
    const pid_t child = fork();
    if (child == 0) {
        signal(SIGILL, SIG_DFL);
        signal(SIGSEGV, SIG_DFL);
        float x[2 * TILE], c[WIDTH * WIDTH];
        for (int i = 0; i < 2 * TILE; i++) memcpy(x + i, &(uint32_t){0x3f803f80}, 4); /* pairs of ones */
        configure();
        multiply_tiles(1, x, TILE, x, c, WIDTH);
        *right = c[0] == NUMBERS && c[WIDTH * WIDTH - 1] == NUMBERS;
        _exit(0);
    }
    while (child > 0 && waitpid(child, NULL, 0) < 0 && errno == EINTR) continue;
    const int found = *right; /* not its status, which another thread may have collected, or nobody */
    munmap(right, sizeof *right);
    return found;
}

int tiled(void) {
    enum { REQUEST = 0x1023, TILES_OF_AMX = 18 }; /* the kernel is asked once for each process */
    return __builtin_cpu_supports("amx-bf16") && __builtin_cpu_supports("avx512bf16") &&
           !syscall(SYS_arch_prctl, REQUEST, TILES_OF_AMX) && multiplies();
}

/* A tile of `by` times lines that lie `step` apart, each of numbers next to each other: the rows of the tile. What is not
 * among the `lines` and `numbers` that are there is zero. */
BFLOAT16 static void along(float *to, const float *from, int64_t step, int64_t lines, int64_t numbers, float by) {
    for (int64_t i = 0; i < LANES; i++) join(to + i * LANES, from + i * step, i < lines ? numbers : 0, by);
}

/* As `along`, but each two lines are a row of the tile. */
BFLOAT16 static void across(float *to, const float *from, int64_t step, int64_t lines, int64_t numbers, float by) {
    for (int64_t i = 0; i < LANES; i++, from += 2 * step) {
        const __m512 first = load(2 * i < lines ? numbers : 0, from);
        const __m512 second = load(2 * i + 1 < lines ? numbers : 0, from + step);
        _mm512_store_si512(to + i * LANES, paired(by * first, by * second));
    }
}

static void turned(float *to, const float *tile) {
    memcpy(to, tile, TILE * sizeof(float));
    transpose(to);
}

/* How many tiles are as long as `numbers`. */
static int64_t tiles(int64_t numbers) { return parts(numbers, NUMBERS); }

/* Where the tiles of X^T as a right factor begin, behind those of X as a left one. */
static float *right(const problem *m, int64_t which) {
    return m->packed + (2 * which + 1) * m->panels * tiles(m->n) * 2 * TILE;
}

static float *left(const problem *m, int64_t which) { return right(m, which) - m->panels * tiles(m->n) * 2 * TILE; }

int64_t words_of_tiles(int64_t g, int64_t n) { return 4 * parts(g, WIDTH) * tiles(n) * TILE; }

/* Packs X and X^T, scaled, block by block of X's rows. */
void pack_tiles(const problem *m) {
    const int64_t depth = tiles(m->n);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < m->count * m->panels * 2; i++) {
        const int64_t which = i / (2 * m->panels), block = i % (2 * m->panels), first = block * LANES;
        const float *x = m->x + which * m->g * m->n + first * m->row, by = scale(m, which);
        float *rows = left(m, which) + block * depth * TILE;
        float *columns = right(m, which) + (block / 2 * depth * 2 + block % 2) * TILE;
        for (int64_t s = 0; s < m->n; s += NUMBERS, rows += TILE, columns += 2 * TILE)
            if (m->column == 1) {
                along(rows, x + s, m->row, m->g - first, m->n - s, by);
                turned(columns, rows);
            } else {
                across(columns, x + s * m->column, m->column, m->n - s, m->g - first, by);
                turned(rows, columns);
            }
    }
}

/* As `square` in orthogonal.c. */
TILED void square_tiles(const problem *m) {
    const int64_t stride = m->stride, all = tiles(m->n), depth = parts(all, parts(all, 2 * DEPTH / NUMBERS));
    configure();
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < m->count * m->panels; i++) {
        const int64_t which = i % m->count, panel = m->panels - 1 - i / m->count; /* long ones first */
        const float *x = left(m, which), *y = right(m, which) + panel * all * 2 * TILE;
        float block[WIDTH * WIDTH] __attribute__((aligned(64)));
        for (int64_t s = 0; s < all; s += depth)
            for (int64_t above = 0; above <= panel; above++) {
                float *c = m->gram + which * m->size + above * WIDTH * stride + panel * WIDTH;
                multiply_tiles(least(depth, all - s), x + (2 * above * all + s) * TILE, all * TILE, y + s * 2 * TILE, block,
                               WIDTH);
                for (int64_t r = 0; r < least(WIDTH, m->side - above * WIDTH); r++)
#pragma omp simd
                    for (int64_t j = 0; j < WIDTH; j++)
                        c[r * stride + j] = block[r * WIDTH + j] + (s ? c[r * stride + j] : 0);
            }
    }
    _tile_release();
}

/* Packs the sum in the place of G. */
void couple_tiles(const problem *m) {
    const int64_t depth = tiles(m->g);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < m->count * m->panels * 2; i++) {
        const int64_t which = i / (2 * m->panels), block = i % (2 * m->panels), first = block * LANES;
        const float *sum = m->gram + which * m->size + first * m->stride;
        for (int64_t s = 0; s < depth; s++)
            along(left(m, which) + (block * depth + s) * TILE, sum + s * NUMBERS, m->stride, m->side - first,
                  m->g - s * NUMBERS, 1);
    }
}

/* As `finish` in orthogonal.c. */
TILED void finish_tiles(const problem *m) {
    const int64_t panels = parts(m->n, WIDTH), depth = tiles(m->g);
    configure();
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < m->count * panels; i++) {
        const int64_t which = i / panels, first = i % panels * WIDTH, there = least(WIDTH, m->n - first);
        float *x = m->x + which * m->g * m->n + first * m->column;
        const float *sum = left(m, which), by = scale(m, which);
        float panel[2 * depth * TILE] __attribute__((aligned(64)));
        for (int64_t at = 0; at < 2 * depth; at++) {
            const int64_t s = at / 2 * NUMBERS, j = at % 2 * LANES;
            float *to = panel + at * TILE;
            if (m->column == 1) {
                across(to, x + s * m->row + j, m->row, m->g - s, there - j, by);
                continue;
            }
            along(to, x + j * m->column + s, m->column, there - j, m->g - s, by);
            transpose(to);
        }
        for (int64_t top = 0; top < m->g; top += WIDTH) {
            const float *rows = sum + top / LANES * depth * TILE;
            float *to = x + top * m->row, block[WIDTH][WIDTH] __attribute__((aligned(64)));
            if (m->column == 1 && there == WIDTH && m->g - top >= WIDTH) {
                multiply_tiles(depth, rows, depth * TILE, panel, to, m->row);
                continue;
            }
            multiply_tiles(depth, rows, depth * TILE, panel, block[0], WIDTH);
            put(m, to, block, least(WIDTH, m->g - top), there);
        }
    }
    _tile_release();
}
#else
int tiled(void) { return 0; }
int64_t words_of_tiles(int64_t g, int64_t n) { return 0; }
void pack_tiles(const problem *m) {}
void square_tiles(const problem *m) {}
void couple_tiles(const problem *m) {}
void finish_tiles(const problem *m) {}
#endif
