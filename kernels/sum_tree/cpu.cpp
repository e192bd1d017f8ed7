// The sum tree on the CPU; its layout stands in layout.py, its rules in op.py.
//
// A node is eight children, one cache line of float64: a million leaves are seven levels, of which all but the lowest
// two or three stay in the L2 cache. (Sixteen were slower to sum, and in float64 took two lines to read.) Searches go
// down together, level by level: while one waits for its next node the others add, one per SIMD lane. Sums run from left
// to right here and in triton.py, so all versions choose the same leaf.
#include <algorithm>
#include <limits>
#include <vector>

#include "abi.h"
#include "binding.h"
#include "scan.h"

namespace grl {
namespace {

constexpr int64_t kFan = 8;        // equal to FANOUT in layout.py
constexpr int64_t kLevels = 24;    // 8^22 leaves do not fit in an int64
constexpr int64_t kTogether = 64;  // searches that go down side by side

template <class T>
struct Tree {
    static constexpr int kLanes = 16 / sizeof(T);  // what every machine has; AVX2 made searches no faster
    using V = typename Vec<T, kLanes>::type;
    static constexpr T kInfinity = std::numeric_limits<T>::infinity();

    T* leaves;
    T* inner;  // [3, width]: sums, smallest above zero (or 0), largest
    int64_t capacity, width = 0;
    int64_t root = 0;                              // level of the root; the leaves are level 0
    int64_t size[kLevels] = {}, at[kLevels] = {};  // of each level: nodes, and where they begin in `inner`

    Tree(T* leaves, T* inner, int64_t capacity) : leaves(leaves), inner(inner), capacity(capacity) {
        for (size[0] = capacity; root == 0 || size[root] > 1; ++root) size[root + 1] = (size[root] + kFan - 1) / kFan;
        for (int64_t level = root; level > 0; --level) {
            at[level] = width;
            width += (size[level] + kFan - 1) / kFan * kFan;
        }
    }

    // The last node of leaves may be cut short: `spare` then holds it, filled up with zeros.
    GRL_INLINE const T* node_of_leaves(int64_t node, T* spare) const {
        const T *from = leaves + node * kFan, *end = leaves + capacity;
        if (end - from >= kFan) return from;
        std::fill(std::copy(from, end, spare), spare + kFan, T(0));
        return spare;
    }

    // The nodes of level 1 stand above leaves, whose least and largest are the leaves themselves.
    template <bool AboveLeaves>
    GRL_INLINE void recompute(int64_t level, int64_t node) {
        T spare[kFan];
        const T* w = AboveLeaves ? node_of_leaves(node, spare) : inner + at[level - 1] + node * kFan;
        const int64_t row = AboveLeaves ? 0 : width;
        V least = V{} + kInfinity, largest = {};
        for (int64_t j = 0; j < kFan; j += kLanes) {
            V x, y;
            std::memcpy(&x, w + row + j, sizeof x);
            std::memcpy(&y, w + 2 * row + j, sizeof y);
            const V above_zero = x > V{} ? x : V{} + kInfinity;
            least = above_zero < least ? above_zero : least;
            largest = y > largest ? y : largest;
        }
        T sum = w[0], low = least[0], high = largest[0];
        for (int64_t j = 1; j < kFan; ++j) sum += w[j];
        for (int j = 1; j < kLanes; ++j) low = std::min(low, least[j]), high = std::max(high, largest[j]);
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
int64_t update(Tree<T> tree, const int64_t* from_index, const T* from_priority, int64_t count) {
    // Copies, because what is read may be the tree itself: tree.update(order, tree.leaves).
    std::vector<int64_t> index(from_index, from_index + count);
    const std::vector<T> priority(from_priority, from_priority + count);
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
    std::vector<int64_t>& nodes = index;  // and then their parents
    std::vector<uint64_t> seen;
    for (int64_t level = 1; level <= tree.root; ++level) {
        count = parents_of(nodes.data(), count, tree.size[level], seen);
        if (level == 1)
            for (int64_t i = 0; i < count; ++i) tree.template recompute<true>(level, nodes[i]);
        else
            for (int64_t i = 0; i < count; ++i) tree.template recompute<false>(level, nodes[i]);
    }
    return -1;
}

// Moves prefixes, one per SIMD lane, into the children of the nodes that they fall in. At or past the end it is the last
// child above zero, and past the end below: rounding may put it there, or the caller. A child of zero adds nothing to
// the sum, so it never stops a search.
template <class T>
GRL_INLINE void descend(const T* const* nodes, T* left, int64_t* node) {
    constexpr int W = Tree<T>::kLanes;
    using V = typename Vec<T, W>::type;
    using M = typename Vec<T, W>::mask;
    V sum = {}, before = {}, prefix, x[W];
    M passed = {};  // minus the number of children that end at or before the prefix
    std::memcpy(&prefix, left, sizeof prefix);
    for (int64_t first = 0; first < kFan; first += W) {
        for (int i = 0; i < W; ++i) std::memcpy(&x[i], nodes[i] + first, sizeof(V));
        transpose(x);
        for (int i = 0; i < W; ++i) {
            sum += x[i];
            const M over = sum <= prefix;
            const V ended = over ? sum : V{};
            before = ended > before ? ended : before;
            passed += over;
        }
    }
    prefix -= before;
    std::memcpy(left, &prefix, sizeof prefix);
    for (int i = 0; i < W; ++i) {
        int64_t child = -passed[i];
        if (child == kFan) {
            left[i] = Tree<T>::kInfinity;
            for (child = kFan - 1; child > 0 && !(nodes[i][child] > T(0));) --child;
        }
        node[i] = node[i] * kFan + child;
    }
}

template <class T>
struct Search {
    Tree<T> tree;
    const T* prefix;
    int64_t count, strata;
    int64_t* index;
    T* priority;
};

template <class T>
void search_together(const Search<T>& p, int64_t first) {
    constexpr int W = Tree<T>::kLanes;
    const Tree<T>& tree = p.tree;
    const int64_t n = std::min(kTogether, p.count - first);
    T left[kTogether] = {}, spare[W][kFan];
    int64_t node[kTogether] = {};
    const T* nodes[W];
    for (int64_t i = 0; i < n; ++i) {
        T x = p.prefix[first + i];
        if (p.strata) x = (x + T((first + i) % p.strata)) / T(p.strata) * tree.inner[0];
        left[i] = std::max(T(0), x);
    }
    for (int64_t level = tree.root - 1; level > 0; --level) {
        const T* w = tree.inner + tree.at[level];
        const T* below = level == 1 ? tree.leaves : tree.inner + tree.at[level - 1];
        for (int64_t i = 0; i < n; i += W) {
            for (int j = 0; j < W; ++j) nodes[j] = w + node[i + j] * kFan;
            descend<T>(nodes, left + i, node + i);
            for (int j = 0; j < W; ++j) {
                node[i + j] = std::min(node[i + j], tree.size[level] - 1);  // however damaged `inner` may be
                __builtin_prefetch(below + node[i + j] * kFan);
            }
        }
    }
    for (int64_t i = 0; i < n; i += W) {
        for (int j = 0; j < W; ++j) nodes[j] = tree.node_of_leaves(node[i + j], spare[j]);
        descend<T>(nodes, left + i, node + i);
    }
    for (int64_t i = 0; i < n; ++i) {
        p.index[first + i] = std::min(node[i], tree.capacity - 1);
        p.priority[first + i] = tree.leaves[p.index[first + i]];
    }
}

// Returns -1, or -2 for a tree whose sum is zero, -3 when it is infinite, or the first position whose prefix is NaN.
template <class T>
int64_t search(const Search<T>& p) {
    for (int64_t i = 0; i < p.count; ++i)
        if (p.prefix[i] != p.prefix[i]) return i;
    if (p.count && !(p.tree.inner[0] > T(0))) return -2;
    if (p.count && p.tree.inner[0] == Tree<T>::kInfinity) return -3;
    for (int64_t first = 0; first < p.count; first += kTogether) search_together(p, first);
    return -1;
}

}  // namespace
}  // namespace grl

#define GRL_SUM_TREE(SUFFIX, T)                                                                                        \
    GRL_EXPORT int64_t grl_sum_tree_update_##SUFFIX(T* leaves, T* inner, const int64_t* index, const T* priority,      \
                                                    int64_t capacity, int64_t count) {                                 \
        return grl::update<T>({leaves, inner, capacity}, index, priority, count);                                      \
    }                                                                                                                  \
    GRL_EXPORT int64_t grl_sum_tree_search_##SUFFIX(T* leaves, T* inner, const T* prefix, int64_t* index, T* priority, \
                                                    int64_t capacity, int64_t count, int64_t strata) {                 \
        return grl::search<T>({{leaves, inner, capacity}, prefix, count, strata, index, priority});                    \
    }

GRL_SUM_TREE(f32, float)
GRL_SUM_TREE(f64, double)

GRL_PYTHON(grl_sum_tree_update_f32)
GRL_PYTHON(grl_sum_tree_update_f64)
GRL_PYTHON(grl_sum_tree_search_f32)
GRL_PYTHON(grl_sum_tree_search_f64)
