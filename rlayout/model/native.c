/* Elementwise and row-wise work of the transformer on CPU, on bfloat16 or float32 with float32 inside.
 * Compiled once for each: ELEMENT_FLOAT32 chooses float32.
 *
 * Each function is one pass over memory where PyTorch's separate operations take four to twelve. Matrices
 * are contiguous and row-major. functional.py, softmax.py, head.py, optimizer.py and generation/cache.py hold
 * the reference of every function here, and the tests compare the two. Compiled and loaded by native.py.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef ELEMENT_FLOAT32
typedef float element;
typedef uint32_t element_bits;
#else
typedef uint16_t element;
typedef uint16_t element_bits;
#endif

/* Below this many elements the threads cost more than they save. */
#define PARALLEL_ELEMENTS 32768

#ifdef ELEMENT_FLOAT32
static inline float widen(element x) { return x; }
static inline element narrow(float x) { return x; }
#else
static inline float widen(element x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* Round to nearest even; not-a-number stays one. */
static inline element narrow(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return x != x ? 0x7fc0 : (element)rounded;
}
#endif

/* e^x to 2 units in the last place, written so that compilers vectorize it. Cephes' polynomial on
 * [-ln 2 / 2, ln 2 / 2]; 0 to float32's smallest normal below -87, capped above 88; NaN stays NaN. */
static inline float exp_fast(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    float n = rintf(x * 1.44269504f);
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t bits = ((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &bits, 4);
    return p * power;
}

enum { LANES = 8, TILE = 128 };
typedef element_bits lanes __attribute__((vector_size(LANES * sizeof(element_bits))));

/* Transpose the 8 x 8 block at in (rows of stride cols) into out (rows of stride TILE). */
static inline void transpose_block(const element *in, long cols, element *out) {
    lanes a[LANES], b[LANES];
    for (int i = 0; i < LANES; i++) memcpy(&a[i], in + i * cols, sizeof(lanes));
    /* Interleaving the first half of the rows with the second, three times, exchanges row and column. */
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < LANES / 2; i++) {
            b[2 * i] = __builtin_shufflevector(a[i], a[i + 4], 0, 8, 1, 9, 2, 10, 3, 11);
            b[2 * i + 1] = __builtin_shufflevector(a[i], a[i + 4], 4, 12, 5, 13, 6, 14, 7, 15);
        }
        memcpy(a, b, sizeof(a));
    }
    for (int i = 0; i < LANES; i++) memcpy(out + i * TILE, &a[i], sizeof(lanes));
}

/* out[C, R] = in[R, C] transposed, by tiles, so that every cache line is written whole */
void transpose(const element *restrict in, element *restrict out, long rows, long cols) {
#pragma omp parallel for if (rows * cols > PARALLEL_ELEMENTS)
    for (long r0 = 0; r0 < rows; r0 += TILE)
        for (long c0 = 0; c0 < cols; c0 += TILE) {
            long r1 = r0 + TILE < rows ? r0 + TILE : rows, c1 = c0 + TILE < cols ? c0 + TILE : cols;
            element tile[TILE * TILE];
            if (r1 - r0 == TILE && c1 - c0 == TILE) {
                for (int r = 0; r < TILE; r += LANES)
                    for (int c = 0; c < TILE; c += LANES)
                        transpose_block(in + (r0 + r) * cols + c0 + c, cols, tile + c * TILE + r);
            } else {
                for (long r = r0; r < r1; r++)
                    for (long c = c0; c < c1; c++) tile[(c - c0) * TILE + r - r0] = in[r * cols + c];
            }
            for (long c = c0; c < c1; c++) memcpy(out + c * rows + r0, tile + (c - c0) * TILE, (r1 - r0) * sizeof(element));
        }
}

/* sum[n] += x[n] */
void accumulate(const element *restrict x, float *restrict sum, long n) {
#pragma omp parallel for simd if (parallel : n > PARALLEL_ELEMENTS)
    for (long i = 0; i < n; i++) sum[i] += widen(x[i]);
}

/* *sum = sum of x[n]^2 */
void square_sum(const float *restrict x, double *restrict sum, long n) {
    double total = 0;
#pragma omp parallel for simd reduction(+ : total) if (parallel : n > PARALLEL_ELEMENTS)
    for (long i = 0; i < n; i++) total += (double)x[i] * x[i];
    *sum = total;
}

/* y[T, D] = x * scale * weight[D], scale[T] = 1 / sqrt(mean(x^2) + eps), which is kept */
void rms_norm(const element *restrict x, const element *restrict weight, element *restrict y, float *restrict scale,
              long num, long size, float eps) {
#pragma omp parallel for if (num * size > PARALLEL_ELEMENTS)
    for (long t = 0; t < num; t++) {
        const element *row = x + t * size;
        double square = 0; /* the scale's error would be that of the whole row */
#pragma omp simd reduction(+ : square)
        for (long i = 0; i < size; i++) square += (double)widen(row[i]) * widen(row[i]);
        float s = 1.0 / sqrt(square / size + eps);
#pragma omp simd
        for (long i = 0; i < size; i++) y[t * size + i] = narrow(widen(row[i]) * s * widen(weight[i]));
        scale[t] = s;
    }
}

/* grad_x[T, D], and grad_weight[D] += sum over T; one thread, because the sum is shared */
void rms_norm_backward(const element *restrict x, const element *restrict weight, const float *restrict scale,
                       const element *restrict grad, element *restrict grad_x, float *restrict grad_weight, long num,
                       long size) {
    for (long t = 0; t < num; t++) {
        const element *row = x + t * size, *g = grad + t * size;
        float s = scale[t], dot = 0;
#pragma omp simd reduction(+ : dot)
        for (long i = 0; i < size; i++) dot += widen(row[i]) * widen(g[i]) * widen(weight[i]);
        float pull = dot * s * s / size;
#pragma omp simd
        for (long i = 0; i < size; i++) {
            float xi = widen(row[i]), gi = widen(g[i]);
            grad_x[t * size + i] = narrow((gi * widen(weight[i]) - xi * pull) * s);
            grad_weight[i] += gi * xi * s;
        }
    }
}

/* y[n] = silu(gate) * up */
void swiglu(const element *restrict gate, const element *restrict up, element *restrict y, long n) {
#pragma omp parallel for simd if (parallel : n > PARALLEL_ELEMENTS)
    for (long i = 0; i < n; i++) {
        float g = widen(gate[i]);
        y[i] = narrow(g / (1.0f + exp_fast(-g)) * widen(up[i]));
    }
}

void swiglu_backward(const element *restrict gate, const element *restrict up, const element *restrict grad,
                     element *restrict grad_gate, element *restrict grad_up, long n) {
#pragma omp parallel for simd if (parallel : n > PARALLEL_ELEMENTS)
    for (long i = 0; i < n; i++) {
        float g = widen(gate[i]), d = widen(grad[i]);
        float sigmoid = 1.0f / (1.0f + exp_fast(-g)), silu = g * sigmoid;
        grad_gate[i] = narrow(d * widen(up[i]) * (sigmoid + silu * (1.0f - sigmoid)));
        grad_up[i] = narrow(d * silu);
    }
}

/* y[T, H, d] = x * cos[T, d] + sign * (x with its halves exchanged) * sin[T, d] */
void rotate(const element *restrict x, const element *restrict cosine, const element *restrict sine, element *restrict y,
            long num, long heads, long size, float sign) {
    long half = size / 2;
#pragma omp parallel for if (num * heads * size > PARALLEL_ELEMENTS)
    for (long t = 0; t < num; t++) {
        const element *c = cosine + t * size, *s = sine + t * size;
        for (long h = 0; h < heads; h++) {
            const element *in = x + (t * heads + h) * size;
            element *out = y + (t * heads + h) * size;
#pragma omp simd
            for (long i = 0; i < half; i++) {
                float a = widen(in[i]), b = widen(in[half + i]);
                out[i] = narrow(a * widen(c[i]) + sign * b * widen(s[i]));
                out[half + i] = narrow(b * widen(c[half + i]) + sign * a * widen(s[half + i]));
            }
        }
    }
}

/* In place, scores[B, L, G, M]: softmax over the keys that query l sees, those in
 * (l + offset - window, l + offset]; 0 elsewhere. */
void softmax(element *restrict scores, long batch, long queries, long group, long keys, long offset, long window,
             float scale) {
    long num = batch * queries * group;
#pragma omp parallel for if (num * keys > PARALLEL_ELEMENTS)
    for (long r = 0; r < num; r++) {
        long last = (r / group) % queries + offset + 1;
        long stop = last < keys ? last : keys, start = last - window > 0 ? last - window : 0;
        element *row = scores + r * keys;
        float values[stop - start], top = -INFINITY, sum = 0;
#pragma omp simd reduction(max : top)
        for (long i = 0; i < stop - start; i++) {
            values[i] = widen(row[start + i]) * scale;
            top = values[i] > top ? values[i] : top;
        }
#pragma omp simd reduction(+ : sum)
        for (long i = 0; i < stop - start; i++) {
            values[i] = exp_fast(values[i] - top);
            sum += values[i];
        }
        float inverse = 1.0f / sum;
        memset(row, 0, start * sizeof(element));
#pragma omp simd
        for (long i = 0; i < stop - start; i++) row[start + i] = narrow(values[i] * inverse);
        memset(row + stop, 0, (keys - stop) * sizeof(element));
    }
}

/* In place, grad[B, L, G, M] becomes the gradient of the unscaled scores. */
void softmax_backward(const element *restrict probs, element *restrict grad, long batch, long queries, long group,
                      long keys, long offset, long window, float scale) {
    long num = batch * queries * group;
#pragma omp parallel for if (num * keys > PARALLEL_ELEMENTS)
    for (long r = 0; r < num; r++) {
        long last = (r / group) % queries + offset + 1;
        long stop = last < keys ? last : keys, start = last - window > 0 ? last - window : 0;
        const element *p = probs + r * keys;
        element *g = grad + r * keys;
        float dot = 0;
#pragma omp simd reduction(+ : dot)
        for (long i = start; i < stop; i++) dot += widen(p[i]) * widen(g[i]);
        memset(g, 0, start * sizeof(element));
#pragma omp simd
        for (long i = start; i < stop; i++) g[i] = narrow(widen(p[i]) * (widen(g[i]) - dot) * scale);
        memset(g + stop, 0, (keys - stop) * sizeof(element));
    }
}

/* Add logits[N, W] to the running maximum, sum of exp(x - top) and sum of exp(x - top) * (x - top). */
void head_add(const element *restrict logits, float *restrict top, float *restrict total, float *restrict weighted,
              long num, long words, float inverse_temperature) {
#pragma omp parallel for if (num * words > PARALLEL_ELEMENTS)
    for (long n = 0; n < num; n++) {
        const element *row = logits + n * words;
        float high = -INFINITY, sum = 0, dot = 0;
#pragma omp simd reduction(max : high)
        for (long i = 0; i < words; i++) {
            float x = widen(row[i]);
            high = x > high ? x : high;
        }
        high *= inverse_temperature;
        high = high > top[n] ? high : top[n];
#pragma omp simd reduction(+ : sum, dot)
        for (long i = 0; i < words; i++) {
            float x = widen(row[i]) * inverse_temperature - high, e = exp_fast(x);
            sum += e;
            dot += e * x;
        }
        float shift = top[n] - high, shrink = total[n] > 0 ? exp_fast(shift) : 0;
        weighted[n] = (total[n] > 0 ? (weighted[n] + shift * total[n]) * shrink : 0) + dot;
        total[n] = total[n] * shrink + sum;
        top[n] = high;
    }
}

/* In place: logits[N, W] become scale[n] * (onehot(target) - softmax), target counted from this slice. */
void head_backward(element *restrict logits, const float *restrict normaliser, const float *restrict scale,
                   const int64_t *restrict target, long num, long words, float inverse_temperature) {
#pragma omp parallel for if (num * words > PARALLEL_ELEMENTS)
    for (long n = 0; n < num; n++) {
        element *row = logits + n * words;
        float norm = normaliser[n], s = scale[n];
        int inside = target[n] >= 0 && target[n] < words;
        float hit = inside ? s - s * exp_fast(widen(row[target[n]]) * inverse_temperature - norm) : 0;
#pragma omp simd
        for (long i = 0; i < words; i++)
            row[i] = narrow(-s * exp_fast(widen(row[i]) * inverse_temperature - norm));
        if (inside) row[target[n]] = narrow(hit);
    }
}

/* One AdamW update of n master weights; the arguments are those of optimizer.adamw. */
void adamw(float *restrict weight, float *restrict first, float *restrict second, const float *restrict grad,
           long n, float clip, float rate, float beta1, float beta2, float eps, float decay, float correction1,
           float correction2) {
    float step = rate / correction1, root = 1.0f / sqrtf(correction2), keep = 1.0f - rate * decay;
#pragma omp parallel for simd if (parallel : n > PARALLEL_ELEMENTS)
    for (long i = 0; i < n; i++) {
        float g = grad[i] * clip;
        float m = first[i] + (g - first[i]) * (1.0f - beta1);
        float v = second[i] * beta2 + g * g * (1.0f - beta2);
        first[i] = m;
        second[i] = v;
        weight[i] = weight[i] * keep - step * m / (sqrtf(v) * root + eps);
    }
}

/* Sixteen numbers at once, in the compiler's own vector types: GCC and Clang, any processor. */
enum { WIDTH = 16 };
typedef float floats __attribute__((vector_size(64), aligned(4), may_alias));

#ifdef ELEMENT_FLOAT32
static inline floats widen_all(const element *x) { return *(const floats *)x; }
#else
typedef uint32_t words __attribute__((vector_size(64)));
typedef uint16_t halves __attribute__((vector_size(32), aligned(2), may_alias));

static inline floats widen_all(const element *x) {
    return (floats)(__builtin_convertvector(*(const halves *)x, words) << 16);
}
#endif

static inline float sum_all(floats x) {
    const float *numbers = (const float *)&x;
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < WIDTH; i++) sum += numbers[i];
    return sum;
}

enum { QUERIES = 4, KEY_BLOCK = 64, AHEAD = 8, CACHE_LINE = 64 / sizeof(element) };

/* scores[num, KEY_BLOCK] of num <= QUERIES queries and a block of keys, which are stride apart. The processor
 * does not foresee the jumps between them: it is told of coming keys, and of the values, needed next. */
static inline __attribute__((always_inline)) void score_keys(const int num, const float *query, const element *keys,
                                                             const element *values, float (*scores)[KEY_BLOCK],
                                                             long block, long size, long stride) {
    for (long j = 0; j < block; j++) {
        const element *key = keys + j * stride;
        floats dot[QUERIES];
        for (long i = 0; i < size; i += CACHE_LINE) {
            __builtin_prefetch(key + AHEAD * stride + i);
            __builtin_prefetch(values + j * stride + i);
        }
        for (int g = 0; g < num; g++) dot[g] = (floats){0};
        for (long i = 0; i < size; i += WIDTH) {
            floats k = widen_all(key + i);
            for (int g = 0; g < num; g++) dot[g] += k * *(const floats *)(query + g * size + i);
        }
        for (int g = 0; g < num; g++) scores[g][j] = sum_all(dot[g]);
    }
}

/* total[num, size] += probs[num, KEY_BLOCK] values */
static inline __attribute__((always_inline)) void add_values(const int num, float (*probs)[KEY_BLOCK],
                                                             const element *values, float *total, long block,
                                                             long size, long stride) {
    for (long i = 0; i < size; i += 2 * WIDTH) {
        floats low[QUERIES], high[QUERIES];
        for (int g = 0; g < num; g++) {
            low[g] = *(floats *)(total + g * size + i);
            high[g] = *(floats *)(total + g * size + i + WIDTH);
        }
        for (long j = 0; j < block; j++) {
            const element *value = values + j * stride + i;
            floats v = widen_all(value), w = widen_all(value + WIDTH);
            for (int g = 0; g < num; g++) low[g] += v * probs[g][j], high[g] += w * probs[g][j];
        }
        for (int g = 0; g < num; g++) {
            *(floats *)(total + g * size + i) = low[g];
            *(floats *)(total + g * size + i + WIDTH) = high[g];
        }
    }
}

/* out[num, size]: num <= QUERIES queries, already scaled, over count tokens of one kv head; softmax as it goes */
static inline __attribute__((always_inline)) void attend(const int num, const float *query, const element *keys,
                                                         const element *values, element *out, long count, long size,
                                                         long stride) {
    float top[QUERIES], sum[QUERIES], scores[QUERIES][KEY_BLOCK], total[num * size];
    for (int g = 0; g < num; g++) top[g] = -INFINITY, sum[g] = 0;
    memset(total, 0, num * size * sizeof(float));
    for (long first = 0; first < count; first += KEY_BLOCK) {
        long block = count - first < KEY_BLOCK ? count - first : KEY_BLOCK;
        score_keys(num, query, keys + first * stride, values + first * stride, scores, block, size, stride);
        for (int g = 0; g < num; g++) {
            float high = top[g], add = 0;
#pragma omp simd reduction(max : high)
            for (long j = 0; j < block; j++) high = scores[g][j] > high ? scores[g][j] : high;
            float shrink = first ? exp_fast(top[g] - high) : 0;
#pragma omp simd reduction(+ : add)
            for (long j = 0; j < block; j++) {
                scores[g][j] = exp_fast(scores[g][j] - high);
                add += scores[g][j];
            }
            top[g] = high;
            sum[g] = sum[g] * shrink + add;
            for (long i = 0; i < size; i++) total[g * size + i] *= shrink;
        }
        add_values(num, scores, values + first * stride, total, block, size, stride);
    }
    for (int g = 0; g < num; g++)
        for (long i = 0; i < size; i++) out[g * size + i] = narrow(total[g * size + i] / sum[g]);
}

/* out[B, H, d] of one query q[B, H, d] per slot of keys and values [B, capacity, K, d]: the query stands at
 * positions[B] and sees the last ``window`` tokens, itself included. d is a multiple of 2 WIDTH. */
void decode_attention(const element *restrict q, const element *restrict keys, const element *restrict values,
                      element *restrict out, const int64_t *restrict positions, long batch, long heads,
                      long kv_heads, long size, long capacity, long window, float scale) {
    long group = heads / kv_heads, stride = kv_heads * size;
#pragma omp parallel for schedule(dynamic, 2) if (batch > 1)
    for (long b = 0; b < batch; b++) {
        long stop = positions[b] + 1, start = stop > window ? stop - window : 0, count = stop - start;
        float query[heads * size];
        for (long i = 0; i < heads * size; i++) query[i] = widen(q[b * heads * size + i]) * scale;
        for (long h = 0; h < heads;) {
            long left = group - h % group, place = (b * capacity + start) * stride + h / group * size;
            const float *these = query + h * size;
            const element *k = keys + place, *v = values + place;
            element *o = out + (b * heads + h) * size;
            if (left >= 4)
                attend(4, these, k, v, o, count, size, stride), h += 4;
            else if (left == 3)
                attend(3, these, k, v, o, count, size, stride), h += 3;
            else if (left == 2)
                attend(2, these, k, v, o, count, size, stride), h += 2;
            else
                attend(1, these, k, v, o, count, size, stride), h += 1;
        }
    }
}
