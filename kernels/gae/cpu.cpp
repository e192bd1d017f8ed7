// Generalised advantage estimation and its gradient on the CPU; the equations stand in reference.py.
//
// Arrays are contiguous [outer, steps, inner]. Three ways through them, by shape:
//   rows     inner < 8: W outer rows side by side in SIMD lanes, in tiles that stay in the L1 cache
//   one row  inner == 1 and few rows: W segments of one tile side by side
//   columns  inner >= 8: time is not the fastest dimension, so lanes run along memory
#include <algorithm>

#include "abi.h"
#include "binding.h"
#include "parallel.h"
#include "scan.h"

namespace grl {
namespace {

constexpr int64_t kTile = 512;     // elements of one row in L1: 2 * W * kTile * sizeof(T) = 32 KiB; 256 was 15 % slower
constexpr int64_t kMaxLag = 8;     // inner below this goes by rows
constexpr int64_t kColumns = 256;  // most columns of one task

template <class T>
struct Shape {
    int64_t outer, steps, inner;
    int64_t tasks, block;  // block: rows (by rows, one row) or columns of one task
    bool columns, one_row;
};

// `gamma` and `lmbda` are both per element, or both null and the scalars count.
template <class T>
struct Forward : Shape<T> {
    const T *reward, *value, *next_value;
    const uint8_t *done, *terminated;
    const T *gamma, *lmbda;
    T gamma0, lmbda0;
    T *advantage, *value_target;
    static constexpr bool reverse = true;

    // d = reward + gamma (1 - terminated) next_value - value;  c = gamma lmbda (1 - done)
    template <bool PerStep>
    GRL_INLINE void fill(int64_t at, int64_t n, T* __restrict d, T* __restrict c) const {
        const T *r = reward + at, *v = value + at, *w = next_value + at;
        const T *g = PerStep ? gamma + at : nullptr, *l = PerStep ? lmbda + at : nullptr;
        const uint8_t *e = done + at, *f = terminated + at;
        const T g0 = gamma0, c0 = gamma0 * lmbda0;
        for (int64_t k = 0; k < n; ++k) {
            const T y = PerStep ? g[k] : g0, z = PerStep ? y * l[k] : c0;
            d[k] = r[k] + y * zero_where(f[k] != 0, w[k]) - v[k];
            c[k] = zero_where((e[k] | f[k]) != 0, z);
        }
    }

    template <bool PerStep>
    GRL_INLINE void finish(int64_t at, int64_t n, const T* __restrict d) const {
        const T* v = value + at;
        T *a = advantage + at, *t = value_target + at;
        for (int64_t k = 0; k < n; ++k) {
            a[k] = d[k];
            t[k] = d[k] + v[k];
        }
    }
};

template <class T>
struct Backward : Shape<T> {
    const T *grad_advantage, *grad_value_target, *next_value, *advantage;
    const uint8_t *done, *terminated;
    const T *gamma, *lmbda;
    T gamma0, lmbda0;
    T *grad_reward, *grad_value, *grad_next_value;
    T *grad_gamma, *grad_lmbda;  // both null when not asked for; next_value and advantage are then not read
    static constexpr bool reverse = false;

    // d = grad_advantage + grad_value_target;  c = the coefficient of one step earlier
    template <bool PerStep>
    GRL_INLINE void fill(int64_t at, int64_t n, T* __restrict d, T* __restrict c) const {
        const int64_t lag = this->inner, in_row = at % (this->steps * lag);
        const T *x = grad_advantage + at, *y = grad_value_target + at;
        const int64_t from = at - lag;
        const T c0 = gamma0 * lmbda0;
        for (int64_t k = 0; k < n; ++k) d[k] = x[k] + y[k];
        const int64_t first = std::min(n, std::max<int64_t>(0, lag - in_row));  // the first step has no earlier one
        for (int64_t k = 0; k < first; ++k) c[k] = T(0);
        for (int64_t k = first; k < n; ++k) {
            const T z = PerStep ? gamma[from + k] * lmbda[from + k] : c0;
            c[k] = zero_where((done[from + k] | terminated[from + k]) != 0, z);
        }
    }

    template <bool PerStep>
    GRL_INLINE void finish(int64_t at, int64_t n, const T* __restrict d) const {
        const T *y = grad_value_target + at, *g = PerStep ? gamma + at : nullptr;
        const uint8_t* f = terminated + at;
        T *r = grad_reward + at, *v = grad_value + at, *w = grad_next_value + at;
        const T g0 = gamma0;
        for (int64_t k = 0; k < n; ++k) {
            const T product = (PerStep ? g[k] : g0) * d[k];
            r[k] = d[k];
            v[k] = y[k] - d[k];
            w[k] = zero_where(f[k] != 0, product);
        }
        if (grad_gamma) finish_coefficients<PerStep>(at, n, d);
    }

    template <bool PerStep>
    GRL_INLINE void finish_coefficients(int64_t at, int64_t n, const T* __restrict d) const {
        const int64_t row = this->steps * this->inner, last = row - this->inner, in_row = at % row;
        for (int64_t k = 0; k < n; ++k) {
            const int64_t i = at + k;
            const bool carries = in_row + k < last && !(done[i] | terminated[i]);
            const T later = carries ? advantage[i + this->inner] : T(0), boot = terminated[i] ? T(0) : next_value[i];
            grad_gamma[i] = d[k] * (boot + (PerStep ? lmbda[i] : lmbda0) * later);
            grad_lmbda[i] = d[k] * ((PerStep ? gamma[i] : gamma0) * later);
        }
    }
};

template <class T, int W, bool PerStep, bool Lag1, class P>
GRL_INLINE void run_rows(const P& p, int64_t task) {
    constexpr bool R = P::reverse;
    alignas(64) T d[W * kTile], c[W * kTile];
    typename Vec<T, W>::type carry[Lag1 ? 1 : kMaxLag] = {};
    const int64_t lag = Lag1 ? 1 : p.inner, length = p.steps * lag, row0 = task * W;
    const int64_t rows = std::min<int64_t>(W, p.outer - row0), tiles = (length + kTile - 1) / kTile;
    if (rows < W) std::memset(d, 0, sizeof d), std::memset(c, 0, sizeof c);
    for (int64_t i = 0; i < tiles; ++i) {
        const int64_t at = (R ? tiles - 1 - i : i) * kTile, n = std::min(kTile, length - at);
        const int64_t padded = (n + W - 1) / W * W;
        for (int64_t row = 0; row < rows; ++row) {
            T *dr = d + row * kTile, *cr = c + row * kTile;
            p.template fill<PerStep>((row0 + row) * length + at, n, dr, cr);
            for (int64_t k = n; k < padded; ++k) dr[k] = cr[k] = T(0);
        }
        scan_rows<T, W, R, false, Lag1>(d, c, kTile, padded, carry, lag, (at + (R ? padded - 1 : 0)) % lag);
        for (int64_t row = 0; row < rows; ++row)
            p.template finish<PerStep>((row0 + row) * length + at, n, d + row * kTile);
    }
}

template <class T, int W, bool PerStep, class P>
GRL_INLINE void run_one_row(const P& p, int64_t row) {
    constexpr bool R = P::reverse;
    constexpr int64_t kSegment = 64, kLong = W * kSegment;
    alignas(64) T d[kLong], c[kLong];
    T carry = T(0);
    const int64_t tiles = (p.steps + kLong - 1) / kLong;
    for (int64_t i = 0; i < tiles; ++i) {
        const int64_t at = (R ? tiles - 1 - i : i) * kLong, n = std::min(kLong, p.steps - at);
        const int64_t segment = (n + W * W - 1) / (W * W) * W;
        p.template fill<PerStep>(row * p.steps + at, n, d, c);
        for (int64_t k = n; k < segment * W; ++k) d[k] = c[k] = T(0);
        scan_one_row<T, W, R>(d, c, segment, carry);
        p.template finish<PerStep>(row * p.steps + at, n, d);
    }
}

template <class T, bool PerStep, class P>
GRL_INLINE void run_columns(const P& p, int64_t task) {
    alignas(64) T x[kColumns] = {}, d[kColumns], c[kColumns];
    const int64_t per_outer = (p.inner + p.block - 1) / p.block, first = task % per_outer * p.block;
    const int64_t n = std::min(p.block, p.inner - first);
    for (int64_t s = 0; s < p.steps; ++s) {
        const int64_t t = P::reverse ? p.steps - 1 - s : s;
        const int64_t at = (task / per_outer * p.steps + t) * p.inner + first;
        p.template fill<PerStep>(at, n, d, c);
        for (int64_t k = 0; k < n; ++k) x[k] = d[k] + zero_where(c[k] == T(0), c[k] * x[k]);
        p.template finish<PerStep>(at, n, x);
    }
}

template <class T, int W, bool PerStep, class P>
GRL_INLINE void run_shape(const P& p, int64_t task) {
    if (p.columns)
        run_columns<T, PerStep>(p, task);
    else if (p.one_row)
        run_one_row<T, W, PerStep>(p, task);
    else if (p.inner == 1)
        run_rows<T, W, PerStep, true>(p, task);
    else
        run_rows<T, W, PerStep, false>(p, task);
}

template <class T, int Bytes, class P>
GRL_INLINE void run_task(const void* context, int64_t task) {
    const P& p = *static_cast<const P*>(context);
    if (p.gamma)
        run_shape<T, Bytes / int(sizeof(T)), true>(p, task);
    else
        run_shape<T, Bytes / int(sizeof(T)), false>(p, task);
}

template <class T, class P>
void task_base(const void* context, int64_t task) {
    run_task<T, 16, P>(context, task);
}
#if GRL_X86
template <class T, class P>
GRL_TARGET_AVX2 void task_avx2(const void* context, int64_t task) {
    run_task<T, 32, P>(context, task);
}
template <class T, class P>
GRL_TARGET_AVX512 void task_avx512(const void* context, int64_t task) {
    run_task<T, 32, P>(context, task);
}
#endif

template <class T, class P>
void run(P& p, int64_t threads) {
    static const Isa isa = detect_isa();
    const int64_t lanes = (isa == Isa::base ? 16 : 32) / int64_t(sizeof(T));
    p.columns = p.inner >= kMaxLag;
    p.one_row = p.inner == 1 && 2 * p.outer < lanes && p.steps >= 4 * lanes;
    if (p.columns) {
        const int64_t share = (p.outer * p.inner + threads - 1) / threads;
        p.block = std::min({kColumns, std::max<int64_t>(16, (share + 15) / 16 * 16), p.inner});
        p.tasks = p.outer * ((p.inner + p.block - 1) / p.block);
    } else {
        p.block = p.one_row ? 1 : lanes;
        p.tasks = (p.outer + p.block - 1) / p.block;
    }
    Task task = task_base<T, P>;
#if GRL_X86
    if (isa == Isa::avx512) task = task_avx512<T, P>;
    if (isa == Isa::avx2) task = task_avx2<T, P>;
#endif
    parallel_for(p.tasks, threads, task, &p);
}

}  // namespace
}  // namespace grl

#define GRL_GAE(SUFFIX, T)                                                                                             \
    GRL_EXPORT void grl_gae_##SUFFIX(const T* reward, const T* value, const T* next_value, const uint8_t* done,        \
                                     const uint8_t* terminated, const T* gamma, const T* lmbda, double gamma0,         \
                                     double lmbda0, T* advantage, T* value_target, int64_t outer, int64_t steps,       \
                                     int64_t inner, int64_t threads) {                                                 \
        grl::Forward<T> p{{outer, steps, inner, 0, 0, false, false}, reward,    value,     next_value, done,           \
                          terminated, gamma, lmbda, T(gamma0), T(lmbda0), advantage, value_target};                    \
        grl::run<T>(p, threads);                                                                                       \
    }                                                                                                                  \
    GRL_EXPORT void grl_gae_backward_##SUFFIX(                                                                         \
        const T* grad_advantage, const T* grad_value_target, const T* next_value, const T* advantage,                  \
        const uint8_t* done, const uint8_t* terminated, const T* gamma, const T* lmbda, double gamma0, double lmbda0,  \
        T* grad_reward, T* grad_value, T* grad_next_value, T* grad_gamma, T* grad_lmbda, int64_t outer, int64_t steps, \
        int64_t inner, int64_t threads) {                                                                              \
        grl::Backward<T> p{{outer, steps, inner, 0, 0, false, false}, grad_advantage, grad_value_target, next_value,   \
                           advantage, done, terminated, gamma, lmbda, T(gamma0), T(lmbda0), grad_reward, grad_value,   \
                           grad_next_value, grad_gamma, grad_lmbda};                                                   \
        grl::run<T>(p, threads);                                                                                       \
    }

GRL_GAE(f32, float)
GRL_GAE(f64, double)

GRL_PYTHON(grl_gae_f32)
GRL_PYTHON(grl_gae_f64)
GRL_PYTHON(grl_gae_backward_f32)
GRL_PYTHON(grl_gae_backward_f64)
