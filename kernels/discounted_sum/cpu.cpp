// Discounted reward-to-go and its gradient on the CPU; the equation stands in reference.py.
#include "recurrence.h"

namespace grl {
namespace {

// `gamma` is per element, or null and the scalar counts. `done` may be null: no step is.
template <class T>
struct Forward : Shape<T> {
    const T* reward;
    const uint8_t* done;
    const T* gamma;
    T gamma0;
    T* result;
    static constexpr bool reverse = true;

    // d = reward;  c = gamma (1 - done)
    template <bool PerStep>
    GRL_INLINE void fill(int64_t at, int64_t n, T* __restrict d, T* __restrict c) const {
        const T *r = reward + at, *g = PerStep ? gamma + at : nullptr;
        const uint8_t* e = flags_at(done, at);
        const T g0 = gamma0;
        for (int64_t k = 0; k < n; ++k) {
            const T y = PerStep ? g[k] : g0;
            d[k] = r[k];
            c[k] = zero_where(e[k] != 0, y);
        }
    }

    template <bool PerStep>
    GRL_INLINE void finish(int64_t at, int64_t n, const T* __restrict x) const {
        std::memcpy(result + at, x, size_t(n) * sizeof(T));
    }
};

template <class T>
struct Backward : Shape<T> {
    const T *grad, *result;
    const uint8_t* done;
    const T* gamma;
    T gamma0;
    T *grad_reward, *grad_gamma;  // grad_gamma is null when not asked for; result is then not read
    static constexpr bool reverse = false;

    // d = grad;  c = the coefficient of one step earlier
    template <bool PerStep>
    GRL_INLINE void fill(int64_t at, int64_t n, T* __restrict d, T* __restrict c) const {
        const int64_t from = at - this->inner, first = this->in_first(at, n);  // the first step has no earlier one
        const uint8_t* e = flags_at(done, from);
        std::memcpy(d, grad + at, size_t(n) * sizeof(T));
        for (int64_t k = 0; k < first; ++k) c[k] = T(0);
        for (int64_t k = first; k < n; ++k) c[k] = zero_where(e[k] != 0, PerStep ? gamma[from + k] : gamma0);
    }

    template <bool PerStep>
    GRL_INLINE void finish(int64_t at, int64_t n, const T* __restrict x) const {
        std::memcpy(grad_reward + at, x, size_t(n) * sizeof(T));
        if (!grad_gamma) return;
        const uint8_t* e = flags_at(done, at);
        const int64_t last = this->before_last(at, n);
        for (int64_t k = 0; k < n; ++k) {
            const bool carries = k < last && !e[k];
            grad_gamma[at + k] = carries ? x[k] * result[at + k + this->inner] : T(0);
        }
    }
};

}  // namespace
}  // namespace grl

#define GRL_DISCOUNTED_SUM(SUFFIX, T)                                                                                  \
    GRL_EXPORT void grl_discounted_sum_##SUFFIX(const T* reward, const uint8_t* done, const T* gamma, double gamma0,   \
                                                T* result, int64_t outer, int64_t steps, int64_t inner,                \
                                                int64_t threads) {                                                     \
        grl::Forward<T> p{{outer, steps, inner, gamma != nullptr}, reward, done, gamma, T(gamma0), result};            \
        grl::run<T>(p, threads);                                                                                       \
    }                                                                                                                  \
    GRL_EXPORT void grl_discounted_sum_backward_##SUFFIX(                                                              \
        const T* grad, const T* result, const uint8_t* done, const T* gamma, double gamma0, T* grad_reward,            \
        T* grad_gamma, int64_t outer, int64_t steps, int64_t inner, int64_t threads) {                                 \
        grl::Backward<T> p{{outer, steps, inner, gamma != nullptr}, grad, result, done, gamma, T(gamma0), grad_reward, \
                           grad_gamma};                                                                                \
        grl::run<T>(p, threads);                                                                                       \
    }

GRL_DISCOUNTED_SUM(f32, float)
GRL_DISCOUNTED_SUM(f64, double)
