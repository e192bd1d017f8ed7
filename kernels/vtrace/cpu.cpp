// V-trace and its gradient on the CPU; the equations stand in reference.py.
#include "recurrence.h"

namespace grl {
namespace {

// min(x, most), but NaN stays NaN: a lost ratio must not pass for a clipped one.
template <class T>
GRL_INLINE T clip(T x, T most) {
    return x > most ? most : x;
}

// `gamma` and `lmbda` are both per element, or both null and the scalars count.
template <class T>
struct Inputs : Shape<T> {
    const T* ratio;
    const uint8_t *done, *terminated;
    const T *gamma, *lmbda;
    T gamma0, lmbda0, rho_clip, c_clip;

    // The trace coefficient of element i, zero where the step is over.
    template <bool PerStep>
    GRL_INLINE T trace(int64_t i) const {
        const T c = PerStep ? gamma[i] * lmbda[i] : gamma0 * lmbda0;
        return zero_where((done[i] | terminated[i]) != 0, c * clip(ratio[i], c_clip));
    }
};

template <class T>
struct Forward : Inputs<T> {
    const T *reward, *value, *next_value;
    T *value_target, *advantage;
    static constexpr bool reverse = true;

    // d = rho (reward + gamma (1 - terminated) next_value - value);  c = gamma lmbda min(c_clip, ratio) (1 - done)
    template <bool PerStep>
    GRL_INLINE void fill(int64_t at, int64_t n, T* __restrict d, T* __restrict c) const {
        const T *r = reward + at, *v = value + at, *w = next_value + at, *p = this->ratio + at;
        const T* g = PerStep ? this->gamma + at : nullptr;
        const uint8_t* f = this->terminated + at;
        const T g0 = this->gamma0, most = this->rho_clip;
        for (int64_t k = 0; k < n; ++k) {
            d[k] = clip(p[k], most) * (r[k] + (PerStep ? g[k] : g0) * zero_where(f[k] != 0, w[k]) - v[k]);
            c[k] = this->template trace<PerStep>(at + k);
        }
        for (int64_t k = this->before_last(at, n); k < n; ++k) c[k] = T(0);  // an infinite ratio must not meet 0
    }

    // The steps after this window are finished: their value_target is read back from memory.
    template <bool PerStep>
    GRL_INLINE void finish(int64_t at, int64_t n, const T* __restrict x) const {
        const T *v = value + at, *w = next_value + at, *r = reward + at, *p = this->ratio + at;
        const T* g = PerStep ? this->gamma + at : nullptr;
        const uint8_t *e = this->done + at, *f = this->terminated + at;
        const T g0 = this->gamma0, most = this->rho_clip;
        T *__restrict s = value_target + at, *__restrict a = advantage + at;
        for (int64_t k = 0; k < n; ++k) s[k] = v[k] + x[k];
        const T* next = s + this->inner;
        const int64_t last = this->before_last(at, n);
        for (int64_t k = 0; k < last; ++k) {
            const T y = PerStep ? g[k] : g0;
            const bool over = (e[k] | f[k]) != 0;
            const T boot = zero_where(over | (y == T(0)), next[k]) + zero_where(!over | (f[k] != 0), w[k]);
            a[k] = clip(p[k], most) * (r[k] + y * boot - v[k]);
        }
        for (int64_t k = last; k < n; ++k)
            a[k] = clip(p[k], most) * (r[k] + (PerStep ? g[k] : g0) * zero_where(f[k] != 0, w[k]) - v[k]);
    }
};

template <class T>
struct Backward : Inputs<T> {
    const T *grad_value_target, *grad_advantage, *value, *next_value, *value_target;
    T *grad_reward, *grad_value, *grad_next_value;
    T *grad_gamma, *grad_lmbda;  // both null when not asked for; the three values are then not read
    static constexpr bool reverse = false;

    // d = grad_value_target + [gamma rho (1 - done) grad_advantage] of one step earlier: all that reaches value_target
    // from outside;  c = the trace of one step earlier. grad_value keeps d for finish.
    template <bool PerStep>
    GRL_INLINE void fill(int64_t at, int64_t n, T* __restrict d, T* __restrict c) const {
        const int64_t first = this->in_first(at, n), from = at - this->inner;
        const T *y = grad_value_target + at, g0 = this->gamma0, most = this->rho_clip;
        T* __restrict kept = grad_value + at;
        for (int64_t k = 0; k < first; ++k) kept[k] = d[k] = y[k], c[k] = T(0);
        for (int64_t k = first; k < n; ++k) {
            const int64_t i = from + k;
            const T z = (PerStep ? this->gamma[i] : g0) * clip(this->ratio[i], most) * grad_advantage[i];
            kept[k] = d[k] = y[k] + zero_where((this->done[i] | this->terminated[i]) != 0, z);
            c[k] = this->template trace<PerStep>(i);
        }
    }

    template <bool PerStep>
    GRL_INLINE void finish(int64_t at, int64_t n, const T* __restrict y) const {
        const T *x = grad_advantage + at, *p = this->ratio + at, *g = PerStep ? this->gamma + at : nullptr;
        const uint8_t *e = this->done + at, *f = this->terminated + at;
        T *__restrict r = grad_reward + at, *__restrict v = grad_value + at, *__restrict w = grad_next_value + at;
        const T g0 = this->gamma0, most = this->rho_clip;
        const int64_t last = this->before_last(at, n);
        for (int64_t k = 0; k < n; ++k) {
            const T rho = clip(p[k], most), own = zero_where(k < last && !(e[k] | f[k]), x[k]);
            r[k] = rho * (y[k] + x[k]);
            v[k] -= r[k];
            w[k] = zero_where(f[k] != 0, (PerStep ? g[k] : g0) * rho * (y[k] + own));
        }
        if (grad_gamma) finish_coefficients<PerStep>(at, n, y);
    }

    template <bool PerStep>
    GRL_INLINE void finish_coefficients(int64_t at, int64_t n, const T* __restrict y) const {
        const int64_t last = this->before_last(at, n);
        for (int64_t k = 0; k < n; ++k) {
            const int64_t i = at + k, j = i + this->inner;
            const bool carries = k < last && !(this->done[i] | this->terminated[i]);
            const T boot = this->terminated[i] ? T(0) : next_value[i], further = carries ? value_target[j] : boot;
            const T traced = clip(this->ratio[i], this->c_clip) * y[k] * (carries ? further - value[j] : T(0));
            const T own = clip(this->ratio[i], this->rho_clip) * (y[k] * boot + grad_advantage[i] * further);
            grad_gamma[i] = own + (PerStep ? this->lmbda[i] : this->lmbda0) * traced;
            grad_lmbda[i] = (PerStep ? this->gamma[i] : this->gamma0) * traced;
        }
    }
};

}  // namespace
}  // namespace grl

#define GRL_VTRACE(SUFFIX, T)                                                                                          \
    GRL_EXPORT void grl_vtrace_##SUFFIX(                                                                               \
        const T* reward, const T* value, const T* next_value, const T* ratio, const uint8_t* done,                     \
        const uint8_t* terminated, const T* gamma, const T* lmbda, double gamma0, double lmbda0, double rho_clip,      \
        double c_clip, T* value_target, T* advantage, int64_t outer, int64_t steps, int64_t inner, int64_t threads) {  \
        grl::Forward<T> p{{{outer, steps, inner, gamma != nullptr}, ratio, done, terminated, gamma, lmbda, T(gamma0),  \
                           T(lmbda0), T(rho_clip), T(c_clip)}, reward, value, next_value, value_target, advantage};    \
        grl::run<T>(p, threads);                                                                                       \
    }                                                                                                                  \
    GRL_EXPORT void grl_vtrace_backward_##SUFFIX(                                                                      \
        const T* grad_value_target, const T* grad_advantage, const T* value, const T* next_value,                      \
        const T* value_target, const T* ratio, const uint8_t* done, const uint8_t* terminated, const T* gamma,         \
        const T* lmbda, double gamma0, double lmbda0, double rho_clip, double c_clip, T* grad_reward, T* grad_value,   \
        T* grad_next_value, T* grad_gamma, T* grad_lmbda, int64_t outer, int64_t steps, int64_t inner,                 \
        int64_t threads) {                                                                                             \
        grl::Backward<T> p{{{outer, steps, inner, gamma != nullptr}, ratio, done, terminated, gamma, lmbda, T(gamma0), \
                            T(lmbda0), T(rho_clip), T(c_clip)}, grad_value_target, grad_advantage, value, next_value,  \
                           value_target, grad_reward, grad_value, grad_next_value, grad_gamma, grad_lmbda};            \
        grl::run<T>(p, threads);                                                                                       \
    }

GRL_VTRACE(f32, float)
GRL_VTRACE(f64, double)
