// n-step returns and the gradient of their rewards on the CPU; the equations stand in reference.py.
//
// Arrays are contiguous [outer, steps, inner], so the row i steps later is i * inner elements on, whatever the layout:
// a tile of windows side by side takes its i-th rewards from one contiguous run. No tile depends on another.
#include <algorithm>

#include "abi.h"
#include "binding.h"
#include "parallel.h"
#include "scan.h"

namespace grl {
namespace {

constexpr int64_t kTile = 512;

template <class T>
struct Windows {
    int64_t outer, steps, inner, n;  // n: no window is longer
    const uint8_t *done, *terminated;
    const T* gamma;  // one per element, or null: gamma0
    T gamma0;
    const int32_t* horizon;  // the longest window that starts at each element, or null: n
    int64_t length() const { return steps * inner; }
    int64_t tiles() const { return (length() + kTile - 1) / kTile; }
};

template <class T>
struct Forward : Windows<T> {
    const T* reward;
    T *total, *discount;
    int64_t* index;
};

template <class T>
struct Backward : Windows<T> {
    const T* grad;
    T* grad_reward;
};

template <class T>
GRL_INLINE T select(bool yes, T x, T y) {
    return yes ? x : y;
}

// x where the mask is all ones, zero where it is all zeros.
template <class T, class Bits>
GRL_INLINE T masked(Bits mask, T x) {
    Bits bits;
    std::memcpy(&bits, &x, sizeof x);
    bits &= mask;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

// The windows that start at begin .. end of one outer block, a step of all of them at a time.
template <class T, bool PerStep, bool Horizon>
GRL_INLINE void run(const Forward<T>& p, int64_t first, int64_t begin, int64_t end) {
    using Bits = typename Unsigned<sizeof(T)>::type;
    alignas(64) T sum[kTile], product[kTile];
    alignas(64) Bits open[kTile], count[kTile], ended[kTile];
    const int64_t size = end - begin;
    for (int64_t k = 0; k < size; ++k) sum[k] = T(0), product[k] = T(1), open[k] = ~Bits(0), count[k] = ended[k] = 0;
    Bits any = 1;
    for (int64_t i = 0; i < p.n && any; ++i) {
        const int64_t e = first + begin + i * p.inner, live = std::min(size, p.length() - i * p.inner - begin);
        const T *r = p.reward + e, *g = PerStep ? p.gamma + e : nullptr, g0 = p.gamma0;
        const int32_t* h = Horizon ? p.horizon + first + begin : nullptr;
        const uint8_t *d = p.done + e, *f = p.terminated + e;
        any = 0;
        for (int64_t k = 0; k < live; ++k) {
            Bits mask = open[k];
            if (Horizon) mask &= Bits(0) - Bits(i == 0 || h[k] > i);
            sum[k] += masked(mask, product[k] * r[k]);
            product[k] = select(mask != 0, product[k] * (PerStep ? g[k] : g0), product[k]);
            count[k] += mask & 1;
            ended[k] |= mask & Bits(f[k]);
            open[k] = mask & (Bits((d[k] | f[k]) != 0) - Bits(1));
            any |= open[k];
        }
    }
    T *total = p.total + first + begin, *discount = p.discount + first + begin;
    int64_t* index = p.index + first + begin;
    for (int64_t k = 0; k < size; ++k) {
        total[k] = sum[k];
        discount[k] = zero_where(ended[k] != 0, product[k]);
    }
    if (p.inner == 1) {  // SIMD; the counter below is scalar
        for (int64_t k = 0; k < size; ++k) index[k] = begin + k + int64_t(count[k]) - 1;
        return;
    }
    int64_t t = begin / p.inner, lane = begin % p.inner;
    for (int64_t k = 0; k < size; ++k) {
        index[k] = t + int64_t(count[k]) - 1;
        if (++lane == p.inner) lane = 0, ++t;
    }
}

// grad_reward[u] gathers from each window that reaches u: those that start i steps earlier with no cut between.
template <class T, bool PerStep, bool Horizon>
GRL_INLINE void run(const Backward<T>& p, int64_t first, int64_t begin, int64_t end) {
    using Bits = typename Unsigned<sizeof(T)>::type;
    alignas(64) T sum[kTile], product[kTile];
    alignas(64) Bits open[kTile];
    for (int64_t k = 0; k < end - begin; ++k) product[k] = T(1), open[k] = ~Bits(0), sum[k] = p.grad[first + begin + k];
    Bits any = 1;
    for (int64_t i = 1; i < p.n && any; ++i) {
        const int64_t e = first + begin - i * p.inner, from = std::max<int64_t>(0, i * p.inner - begin);
        const T *y = p.grad + e, *g = PerStep ? p.gamma + e : nullptr, g0 = p.gamma0;
        const int32_t* h = Horizon ? p.horizon + e : nullptr;
        const uint8_t *d = p.done + e, *f = p.terminated + e;
        any = 0;
        for (int64_t k = from; k < end - begin; ++k) {
            open[k] &= Bits((d[k] | f[k]) != 0) - Bits(1);
            product[k] *= PerStep ? g[k] : g0;
            const Bits reaches = Horizon ? Bits(0) - Bits(h[k] > i) : ~Bits(0);
            sum[k] += masked(open[k] & reaches, product[k] * y[k]);
            any |= open[k];
        }
    }
    for (int64_t k = 0; k < end - begin; ++k) p.grad_reward[first + begin + k] = sum[k];
}

template <class T, class P>
GRL_INLINE void run_task(const void* context, int64_t task) {
    const P& p = *static_cast<const P*>(context);
    const int64_t first = task / p.tiles() * p.length(), begin = task % p.tiles() * kTile;
    const int64_t end = std::min(begin + kTile, p.length());
    if (p.gamma)
        p.horizon ? run<T, true, true>(p, first, begin, end) : run<T, true, false>(p, first, begin, end);
    else
        p.horizon ? run<T, false, true>(p, first, begin, end) : run<T, false, false>(p, first, begin, end);
}

template <class T, class P>
void task_base(const void* context, int64_t task) {
    run_task<T, P>(context, task);
}
#if GRL_X86
template <class T, class P>
GRL_TARGET_AVX2 void task_avx2(const void* context, int64_t task) {
    run_task<T, P>(context, task);
}
template <class T, class P>
GRL_TARGET_AVX512 void task_avx512(const void* context, int64_t task) {
    run_task<T, P>(context, task);
}
#endif

template <class T, class P>
void launch(const P& p, int64_t threads) {
    static const Isa isa = detect_isa();
    Task task = task_base<T, P>;
#if GRL_X86
    if (isa == Isa::avx512) task = task_avx512<T, P>;
    if (isa == Isa::avx2) task = task_avx2<T, P>;
#else
    (void)isa;
#endif
    parallel_for(p.outer * p.tiles(), threads, task, &p);
}

}  // namespace
}  // namespace grl

#define GRL_N_STEP(SUFFIX, T)                                                                                          \
    GRL_EXPORT void grl_n_step_return_##SUFFIX(const T* reward, const uint8_t* done, const uint8_t* terminated,        \
                                        const T* gamma, const int32_t* horizon, double gamma0, int64_t n, T* total,    \
                                        T* discount, int64_t* index, int64_t outer, int64_t steps, int64_t inner,      \
                                        int64_t threads) {                                                             \
        grl::Forward<T> p{{outer, steps, inner, n, done, terminated, gamma, T(gamma0), horizon}, reward, total,        \
                          discount, index};                                                                            \
        grl::launch<T>(p, threads);                                                                                    \
    }                                                                                                                  \
    GRL_EXPORT void grl_n_step_return_backward_##SUFFIX(                                                               \
        const T* grad, const uint8_t* done, const uint8_t* terminated, const T* gamma, const int32_t* horizon,         \
        double gamma0, int64_t n, T* grad_reward, int64_t outer, int64_t steps, int64_t inner, int64_t threads) {      \
        grl::Backward<T> p{{outer, steps, inner, n, done, terminated, gamma, T(gamma0), horizon}, grad, grad_reward};  \
        grl::launch<T>(p, threads);                                                                                    \
    }

GRL_N_STEP(f32, float)
GRL_N_STEP(f64, double)

GRL_PYTHON(grl_n_step_return_f32)
GRL_PYTHON(grl_n_step_return_f64)
GRL_PYTHON(grl_n_step_return_backward_f32)
GRL_PYTHON(grl_n_step_return_backward_f64)
