// The sum tree on the CPU; its layout stands in layout.py, its rules in op.py.
//
// A node is eight children, one cache line of float64: a million leaves are seven levels, of which all but the lowest
// two or three stay in the L2 cache. (Sixteen were slower to sum, and in float64 took two lines to read.) Searches go
// down together, level by level: while one waits for its next node the others add. Sums run from left to right here and
// in triton.py, so both choose the same leaf.
#include <algorithm>
#include <limits>
#include <vector>

#include "abi.h"
#include "binding.h"

namespace grl {
namespace {

constexpr int64_t kFan = 8;        // equal to FANOUT in layout.py
constexpr int64_t kLevels = 24;    // 8^22 leaves do not fit in an int64
constexpr int64_t kTogether = 64;  // searches that go down side by side

template <class T>
struct Lanes {  // 16 bytes: SSE2 and NEON are always there, and the sums, not the comparisons, take the time
    static constexpr int64_t count = 16 / sizeof(T);
    typedef T type __attribute__((vector_size(16)));
    static GRL_INLINE type load(const T* from) {
        type x;
        std::memcpy(&x, from, sizeof x);
        return x;
    }
};

template <class T>
struct Tree {
    using V = typename Lanes<T>::type;
    static constexpr int64_t kLanes = Lanes<T>::count;
    static constexpr T kInfinity = std::numeric_limits<T>::infinity();

    T* leaves;
    T* inner;  // [3, width]: sums, smallest above zero (or 0), largest
    int64_t capacity, width;
    int64_t root = 0;                               // level of the root; the leaves are level 0
    int64_t size[kLevels] = {}, at[kLevels] = {};  // of each level: nodes, and where they begin in `inner`

    Tree(T* leaves, T* inner, int64_t capacity, int64_t width)
        : leaves(leaves), inner(inner), capacity(capacity), width(width) {
        for (size[0] = capacity; root == 0 || size[root] > 1; ++root) size[root + 1] = (size[root] + kFan - 1) / kFan;
        for (int64_t level = root; level > 1; --level)
            at[level - 1] = at[level] + (size[level] + kFan - 1) / kFan * kFan;
    }

    // The last node of leaves may be cut short: `spare` then holds it, filled up with zeros.
    GRL_INLINE const T* node_of_leaves(int64_t node, T* spare) const {
        const T *from = leaves + node * kFan, *end = leaves + capacity;
        if (end - from >= kFan) return from;
        std::fill(std::copy(from, end, spare), spare + kFan, T(0));
        return spare;
    }

    // The nodes of level 1 stand above leaves, whose least and largest are the leaves themselves.
    GRL_INLINE void recompute(int64_t level, int64_t node) {
        T spare[kFan];
        const T* w = level == 1 ? node_of_leaves(node, spare) : inner + at[level - 1] + node * kFan;
        const int64_t row = level == 1 ? 0 : width;
        V least = V{} + kInfinity, largest = {};
        for (int64_t j = 0; j < kFan; j += kLanes) {
            const V x = Lanes<T>::load(w + row + j), y = Lanes<T>::load(w + 2 * row + j);
            const V above_zero = x > V{} ? x : V{} + kInfinity;
            least = above_zero < least ? above_zero : least;
            largest = y > largest ? y : largest;
        }
        T sum = w[0], low = least[0], high = largest[0];
        for (int64_t j = 1; j < kFan; ++j) sum += w[j];
        for (int64_t j = 1; j < kLanes; ++j) low = std::min(low, least[j]), high = std::max(high, largest[j]);
        T* to = inner + at[level] + node;
        to[0] = sum, to[width] = low == kInfinity ? T(0) : low, to[2 * width] = high;
    }
};

// Replaces nodes by their parents, one of each, and returns how many there are. A bitmap finds every repetition; where
// it would be large beside the list, as just above the leaves, only neighbours are compared and a few are done twice.
int64_t parents_of(int64_t* nodes, int64_t count, int64_t level_size, std::vector<uint64_t>& seen) {
    const int64_t words = level_size / 64 + 1;
    const bool exact = words <= 2 * count;
    if (exact) seen.assign(words, 0);
    int64_t kept = 0;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t parent = nodes[i] / kFan;
        if (exact) {
            uint64_t &word = seen[parent / 64], bit = uint64_t(1) << (parent % 64);
            nodes[kept] = parent;
            kept += !(word & bit);
            word |= bit;
        } else if (!kept || nodes[kept - 1] != parent) {
            nodes[kept++] = parent;
        }
    }
    return kept;
}

// Returns the first position whose index or priority is refused, before anything is written; -1 when all is well.
template <class T>
int64_t update(Tree<T> tree, const int64_t* index, const T* priority, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        const bool inside = index[i] >= 0 && index[i] < tree.capacity;
        if (!inside || !(priority[i] >= T(0)) || priority[i] == Tree<T>::kInfinity) return i;
        __builtin_prefetch(tree.leaves + index[i], 1);
    }
    for (int64_t i = 0; i < count; ++i) {
        const T* above = tree.inner + tree.at[1] + index[i] / kFan;
        for (int row = 0; row < 3; ++row) __builtin_prefetch(above + row * tree.width, 1);
        tree.leaves[index[i]] = priority[i] + T(0);  // no negative zero
    }
    std::vector<int64_t> nodes(index, index + count);
    std::vector<uint64_t> seen;
    for (int64_t level = 1; level <= tree.root; ++level) {
        count = parents_of(nodes.data(), count, tree.size[level], seen);
        for (int64_t i = 0; i < count; ++i) tree.recompute(level, nodes[i]);
    }
    return -1;
}

// Moves `prefix` into the child it falls in. At or past the end it goes to the last child above zero, and stays past
// the end below: rounding may put it there, or the caller. A child of zero adds nothing to the sum, so never stops it.
template <class T>
GRL_INLINE int64_t descend(const T* w, T& prefix) {
    T sums[kFan + 1];
    sums[0] = T(0);
    int64_t child = 0;
    for (int64_t j = 0; j < kFan; ++j) {
        sums[j + 1] = sums[j] + w[j];
        child += sums[j + 1] <= prefix;
    }
    if (child < kFan) {
        prefix -= sums[child];
        return child;
    }
    prefix = Tree<T>::kInfinity;
    for (child = kFan - 1; child > 0 && !(w[child] > T(0));) --child;
    return child;
}

// Returns -1, or -2 for a tree whose sum is zero, or the first position whose prefix is NaN.
template <class T>
int64_t search(const Tree<T>& tree, const T* prefix, int64_t strata, int64_t count, int64_t* index, T* priority) {
    for (int64_t i = 0; i < count; ++i)
        if (prefix[i] != prefix[i]) return i;
    const T total = tree.inner[0];
    if (count && !(total > T(0))) return -2;
    T left[kTogether], spare[kFan];
    int64_t node[kTogether];
    for (int64_t first = 0; first < count; first += kTogether) {
        const int64_t n = std::min(kTogether, count - first);
        for (int64_t i = 0; i < n; ++i) {
            T x = prefix[first + i];
            if (strata) x = (x + T((first + i) % strata)) / T(strata) * total;
            node[i] = 0, left[i] = std::max(T(0), x);
        }
        for (int64_t level = tree.root - 1; level > 0; --level) {
            const T* w = tree.inner + tree.at[level];
            const T* below = level == 1 ? tree.leaves : tree.inner + tree.at[level - 1];
            for (int64_t i = 0; i < n; ++i) {
                const int64_t child = node[i] * kFan + descend(w + node[i] * kFan, left[i]);
                node[i] = std::min(child, tree.size[level] - 1);  // nor does a damaged `inner` lead outside
                __builtin_prefetch(below + node[i] * kFan);
            }
        }
        for (int64_t i = 0; i < n; ++i) {
            const T* w = tree.node_of_leaves(node[i], spare);
            const int64_t child = descend(w, left[i]);
            index[first + i] = std::min(node[i] * kFan + child, tree.capacity - 1);
            priority[first + i] = w[child];
        }
    }
    return -1;
}

}  // namespace
}  // namespace grl

#define GRL_SUM_TREE(SUFFIX, T)                                                                                        \
    GRL_EXPORT int64_t grl_sum_tree_update_##SUFFIX(T* leaves, T* inner, const int64_t* index, const T* priority,      \
                                                    int64_t capacity, int64_t width, int64_t count) {                  \
        return grl::update<T>({leaves, inner, capacity, width}, index, priority, count);                               \
    }                                                                                                                  \
    GRL_EXPORT int64_t grl_sum_tree_search_##SUFFIX(T* leaves, T* inner, const T* prefix, int64_t* index, T* priority, \
                                                    int64_t capacity, int64_t width, int64_t count, int64_t strata) {  \
        return grl::search<T>({leaves, inner, capacity, width}, prefix, strata, count, index, priority);               \
    }

GRL_SUM_TREE(f32, float)
GRL_SUM_TREE(f64, double)

GRL_PYTHON(grl_sum_tree_update_f32)
GRL_PYTHON(grl_sum_tree_update_f64)
GRL_PYTHON(grl_sum_tree_search_f32)
GRL_PYTHON(grl_sum_tree_search_f64)
