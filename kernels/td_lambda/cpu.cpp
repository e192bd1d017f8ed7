// TD(lambda) returns and their gradient on the CPU; the equations stand in reference.py.
//
// With y = gamma (1 - terminated) and z = lmbda (1 - done), z = 0 at the last step, the return is the recurrence
//   G = reward + y (1 - z) next_value + y z G_later
#include "recurrence.h"

namespace grl {
namespace {

// `gamma` and `lmbda` are both per element, or both null and the scalars count. The flags may be null: none is set.
template <class T>
struct Forward : Shape<T> {
    const T *reward, *next_value;
    const uint8_t *done, *terminated;
    const T *gamma, *lmbda;
    T gamma0, lmbda0;
    T* target;
    static constexpr bool reverse = true;

    // d = reward + y (1 - z) next_value;  c = y z
    template <bool PerStep>
    GRL_INLINE void fill(int64_t at, int64_t n, T* __restrict d, T* __restrict c) const {
        const T *r = reward + at, *w = next_value + at;
        const T *g = PerStep ? gamma + at : nullptr, *l = PerStep ? lmbda + at : nullptr;
        const uint8_t *e = flags_at(done, at), *f = flags_at(terminated, at);
        const T g0 = gamma0, l0 = lmbda0;
        const int64_t last = this->before_last(at, n);
        for (int64_t k = 0; k < last; ++k) {
            const T y = zero_where(f[k] != 0, PerStep ? g[k] : g0);
            const T z = zero_where((e[k] | f[k]) != 0, PerStep ? l[k] : l0), b = y * (T(1) - z);
            d[k] = r[k] + zero_where(b == T(0), b * w[k]);
            c[k] = y * z;
        }
        for (int64_t k = last; k < n; ++k) {
            const T y = zero_where(f[k] != 0, PerStep ? g[k] : g0);
            d[k] = r[k] + zero_where(y == T(0), y * w[k]);
            c[k] = T(0);
        }
    }

    template <bool PerStep>
    GRL_INLINE void finish(int64_t at, int64_t n, const T* __restrict x) const {
        std::memcpy(target + at, x, size_t(n) * sizeof(T));
    }
};

template <class T>
struct Backward : Shape<T> {
    const T *grad, *next_value, *target;
    const uint8_t *done, *terminated;
    const T *gamma, *lmbda;
    T gamma0, lmbda0;
    T *grad_reward, *grad_next_value;
    T *grad_gamma, *grad_lmbda;  // both null when not asked for; next_value and target are then not read
    static constexpr bool reverse = false;

    // d = grad;  c = y z of one step earlier
    template <bool PerStep>
    GRL_INLINE void fill(int64_t at, int64_t n, T* __restrict d, T* __restrict c) const {
        const int64_t from = at - this->inner, first = this->in_first(at, n);  // the first step has no earlier one
        const uint8_t *e = flags_at(done, from), *f = flags_at(terminated, from);
        const T c0 = gamma0 * lmbda0;
        std::memcpy(d, grad + at, size_t(n) * sizeof(T));
        for (int64_t k = 0; k < first; ++k) c[k] = T(0);
        for (int64_t k = first; k < n; ++k) {
            const T product = PerStep ? gamma[from + k] * lmbda[from + k] : c0;
            c[k] = zero_where((e[k] | f[k]) != 0, product);
        }
    }

    template <bool PerStep>
    GRL_INLINE void finish(int64_t at, int64_t n, const T* __restrict x) const {
        const T *g = PerStep ? gamma + at : nullptr, *l = PerStep ? lmbda + at : nullptr;
        const uint8_t *e = flags_at(done, at), *f = flags_at(terminated, at);
        T* w = grad_next_value + at;
        const T g0 = gamma0, l0 = lmbda0;
        const int64_t last = this->before_last(at, n);
        std::memcpy(grad_reward + at, x, size_t(n) * sizeof(T));
        for (int64_t k = 0; k < n; ++k) {
            const T y = zero_where(f[k] != 0, PerStep ? g[k] : g0);
            const T z = zero_where(((e[k] | f[k]) != 0) | (k >= last), PerStep ? l[k] : l0), b = y * (T(1) - z);
            w[k] = zero_where(b == T(0), b * x[k]);
        }
        if (grad_gamma) finish_coefficients<PerStep>(at, n, x, e, f, last);
    }

    template <bool PerStep>
    GRL_INLINE void finish_coefficients(int64_t at, int64_t n, const T* __restrict x, const uint8_t* e,
                                        const uint8_t* f, int64_t last) const {
        for (int64_t k = 0; k < n; ++k) {
            const int64_t i = at + k;
            const bool carries = k < last && !(e[k] | f[k]);
            const T later = carries ? target[i + this->inner] : T(0), boot = f[k] ? T(0) : next_value[i];
            const T y = PerStep ? gamma[i] : gamma0, z = carries ? (PerStep ? lmbda[i] : lmbda0) : T(0), own = T(1) - z;
            const T mixed = zero_where(own == T(0), own * boot) + zero_where(z == T(0), z * later);
            grad_gamma[i] = zero_where(f[k] != 0, x[k] * mixed);
            grad_lmbda[i] = zero_where(!carries | (y == T(0)), x[k] * y * (later - boot));
        }
    }
};

}  // namespace
}  // namespace grl

#define GRL_TD_LAMBDA(SUFFIX, T)                                                                                       \
    GRL_EXPORT void grl_td_lambda_##SUFFIX(const T* reward, const T* next_value, const uint8_t* done,                  \
                                           const uint8_t* terminated, const T* gamma, const T* lmbda, double gamma0,   \
                                           double lmbda0, T* target, int64_t outer, int64_t steps, int64_t inner,      \
                                           int64_t threads) {                                                          \
        grl::Forward<T> p{{outer, steps, inner, gamma != nullptr}, reward, next_value, done, terminated, gamma, lmbda, \
                          T(gamma0), T(lmbda0), target};                                                               \
        grl::run<T>(p, threads);                                                                                       \
    }                                                                                                                  \
    GRL_EXPORT void grl_td_lambda_backward_##SUFFIX(                                                                   \
        const T* grad, const T* next_value, const T* target, const uint8_t* done, const uint8_t* terminated,           \
        const T* gamma, const T* lmbda, double gamma0, double lmbda0, T* grad_reward, T* grad_next_value,              \
        T* grad_gamma, T* grad_lmbda, int64_t outer, int64_t steps, int64_t inner, int64_t threads) {                  \
        grl::Backward<T> p{{outer, steps, inner, gamma != nullptr}, grad, next_value, target, done, terminated, gamma, \
                           lmbda, T(gamma0), T(lmbda0), grad_reward, grad_next_value, grad_gamma, grad_lmbda};         \
        grl::run<T>(p, threads);                                                                                       \
    }

GRL_TD_LAMBDA(f32, float)
GRL_TD_LAMBDA(f64, double)
