// Generalised advantage estimation and its gradient on the CPU; the equations stand in reference.py.
#include "recurrence.h"

namespace grl {
namespace {

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
        const T *x = grad_advantage + at, *y = grad_value_target + at;
        const int64_t from = at - this->inner;
        const T c0 = gamma0 * lmbda0;
        for (int64_t k = 0; k < n; ++k) d[k] = x[k] + y[k];
        const int64_t first = this->in_first(at, n);  // has no earlier one
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
        const int64_t last = this->before_last(at, n);
        for (int64_t k = 0; k < n; ++k) {
            const int64_t i = at + k;
            const bool carries = k < last && !(done[i] | terminated[i]);
            const T later = carries ? advantage[i + this->inner] : T(0), boot = terminated[i] ? T(0) : next_value[i];
            grad_gamma[i] = d[k] * (boot + (PerStep ? lmbda[i] : lmbda0) * later);
            grad_lmbda[i] = d[k] * ((PerStep ? gamma[i] : gamma0) * later);
        }
    }
};

}  // namespace
}  // namespace grl

#define GRL_GAE(SUFFIX, T)                                                                                             \
    GRL_EXPORT void grl_gae_##SUFFIX(const T* reward, const T* value, const T* next_value, const uint8_t* done,        \
                                     const uint8_t* terminated, const T* gamma, const T* lmbda, double gamma0,         \
                                     double lmbda0, T* advantage, T* value_target, int64_t outer, int64_t steps,       \
                                     int64_t inner, int64_t threads) {                                                 \
        grl::Forward<T> p{{outer, steps, inner, gamma != nullptr}, reward,    value,     next_value, done,             \
                          terminated, gamma, lmbda, T(gamma0), T(lmbda0), advantage, value_target};                    \
        grl::run<T>(p, threads);                                                                                       \
    }                                                                                                                  \
    GRL_EXPORT void grl_gae_backward_##SUFFIX(                                                                         \
        const T* grad_advantage, const T* grad_value_target, const T* next_value, const T* advantage,                  \
        const uint8_t* done, const uint8_t* terminated, const T* gamma, const T* lmbda, double gamma0, double lmbda0,  \
        T* grad_reward, T* grad_value, T* grad_next_value, T* grad_gamma, T* grad_lmbda, int64_t outer, int64_t steps, \
        int64_t inner, int64_t threads) {                                                                              \
        grl::Backward<T> p{{outer, steps, inner, gamma != nullptr}, grad_advantage, grad_value_target, next_value,     \
                           advantage, done, terminated, gamma, lmbda, T(gamma0), T(lmbda0), grad_reward, grad_value,   \
                           grad_next_value, grad_gamma, grad_lmbda};                                                   \
        grl::run<T>(p, threads);                                                                                       \
    }

GRL_GAE(f32, float)
GRL_GAE(f64, double)
