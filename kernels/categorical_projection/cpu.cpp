// C51's projection and its transpose on the CPU; the equations stand in reference.py.
//
// The atoms of a row move together, so one walk over the support finds every atom's neighbours, whatever the spacing,
// and a mass that lands on an atom stays there whole. The walk is scalar: guessing the neighbour by arithmetic and
// gathering the support in SIMD lanes was not faster with AVX2 or AVX-512. Shares for the left and for the right
// neighbour are summed apart: in one array each atom would wait for the store of the atom before.
#include <algorithm>
#include <limits>
#include <vector>

#include "abi.h"
#include "binding.h"
#include "parallel.h"
#include "scan.h"

namespace grl {
namespace {

constexpr int64_t kBlock = 2048;  // atoms of one task, in whole rows

template <class T>
struct Projection {
    const T *x, *reward;
    const uint8_t* terminated;
    const T* discount;  // per row, or null and the scalar counts
    T discount0;
    const T *z, *inverse;  // the support and, behind it, infinity; 1 / (z[i + 1] - z[i]), 0 for the last
    T* out;
    int64_t rows, atoms, block;

    // Calls visit(j, i, w) for each of the first `count` atoms: atom j moves to r + g z[j], clipped, where i is the last
    // atom that is not above and w in [0, 1) the part of the way to the next one. NaN gives w = NaN.
    template <class Visit>
    GRL_INLINE void walk(T r, T g, int64_t count, const Visit& visit) const {
        const T *__restrict support = z, *__restrict inv = inverse;
        const T low = support[0], high = support[atoms - 1];
        int64_t i = 0;
        for (int64_t j = 0; j < count; ++j) {
            const T at = std::min(std::max(r + g * support[j], low), high);  // NaN stays
            while (support[i] > at) --i;
            while (support[i + 1] <= at) ++i;
            visit(j, i, (at - support[i]) * inv[i]);
        }
    }

    void forward(int64_t row, T* __restrict right) const {
        const T one = T(1), r = reward[row], g = discount ? discount[row] : discount0;
        const T* p = x + row * atoms;
        T* __restrict left = out + row * atoms;
        std::fill(left, left + atoms, T(0));
        std::fill(right, right + atoms, T(0));
        bool lost = false;
        const bool over = terminated[row];
        if (over) p = &one;  // one unit of mass, at r
        walk(r, over ? T(0) : g, over ? 1 : atoms, [&](int64_t j, int64_t i, T w) {
            const T share = p[j] * w;
            left[i] += p[j] - share;
            right[i] += zero_where(w == T(0), share);
            lost |= w != w;
        });
        for (int64_t i = 1; i < atoms; ++i) left[i] += right[i - 1];
        if (lost) std::fill(left, left + atoms, std::numeric_limits<T>::quiet_NaN());
    }

    void transposed(int64_t row) const {
        const T *q = x + row * atoms, g = discount ? discount[row] : discount0;
        T* __restrict y = out + row * atoms;
        if (terminated[row]) return std::fill(y, y + atoms, T(0)), void();
        walk(reward[row], g, atoms, [&](int64_t j, int64_t i, T w) {
            const T next = q[i + (w != T(0))];  // the last atom has no next one, and w = 0
            y[j] = (T(1) - w) * q[i] + zero_where(w == T(0), w * next);
        });
    }
};

template <class T, bool Transposed>
void run_task(const void* context, int64_t task) {
    const auto& p = *static_cast<const Projection<T>*>(context);
    std::vector<T> right(Transposed ? 0 : p.atoms);
    for (int64_t row = task * p.block, end = std::min(p.rows, row + p.block); row < end; ++row)
        Transposed ? p.transposed(row) : p.forward(row, right.data());
}

template <class T>
void run(Projection<T>& p, bool transpose, int64_t threads) {
    std::vector<T> z(p.z, p.z + p.atoms), inverse(p.atoms);
    z.push_back(std::numeric_limits<T>::infinity());
    bool increases = true;  // up to the infinity behind it, or a walk would leave it
    for (int64_t i = 0; i < p.atoms; ++i) {
        inverse[i] = T(1) / (z[i + 1] - z[i]);
        increases &= z[i + 1] > z[i];
    }
    if (!increases) return std::fill(p.out, p.out + p.rows * p.atoms, std::numeric_limits<T>::quiet_NaN()), void();
    p.z = z.data(), p.inverse = inverse.data();
    p.block = std::max<int64_t>(1, kBlock / p.atoms);
    parallel_for((p.rows + p.block - 1) / p.block, threads, transpose ? run_task<T, true> : run_task<T, false>, &p);
}

}  // namespace
}  // namespace grl

#define GRL_PROJECTION(SUFFIX, T)                                                                                  \
    GRL_EXPORT void grl_categorical_projection_##SUFFIX(                                                           \
        const T* x, const T* reward, const uint8_t* terminated, const T* discount, double discount0,               \
        const T* support, T* out, int64_t rows, int64_t atoms, int64_t transpose, int64_t threads) {               \
        grl::Projection<T> p{x, reward, terminated, discount, T(discount0), support, nullptr, out, rows, atoms, 0}; \
        grl::run<T>(p, transpose != 0, threads);                                                                   \
    }

GRL_PROJECTION(f32, float)
GRL_PROJECTION(f64, double)

GRL_PYTHON(grl_categorical_projection_f32)
GRL_PYTHON(grl_categorical_projection_f64)
