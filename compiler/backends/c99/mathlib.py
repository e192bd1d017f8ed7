"""C text of the numerical helpers that generated code may call; only those in use are written out.

``k_expf k_expm1f k_tanhf k_sigmoidf k_logf k_log1pf k_erff`` are branch-free, so loops over them vectorise under strict
IEEE rules, and they are built from IEEE operations alone, so a result is the same on every C library. NaN goes through.
The polynomials are minimax fits in relative error made for these files: 1.3e-8 for exponentials, 6e-9 for logarithms,
2e-9 for erf.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["MAX_ULP", "helpers_text"]

MAX_ULP = {"k_expf": 2.0, "k_expm1f": 3.0, "k_tanhf": 4.0, "k_sigmoidf": 4.0, "k_logf": 2.0, "k_log1pf": 3.0,
           "k_erff": 3.0}  # fmt: skip
"""Largest error in units in the last place, over all finite floats; a test sweeps every exponent."""

_BITS = "typedef union { float f; uint32_t u; } k_bits;"

_SELECT = """\
/* c ? a : b by bits: gcc keeps ?: on floats as a branch, since a comparison may trap, and then does not vectorise */
static inline float k_select(const int c, const float a, const float b)
{
    k_bits x, y;
    const uint32_t mask = 0u - (uint32_t)c;
    x.f = a;
    y.f = b;
    y.u = (x.u & mask) | (y.u & ~mask);
    return y.f;
}"""

_HALF = """\
/* the number that 16 bits of IEEE 754 binary16 stand for, exactly, subnormal ones too; infinity and NaN are not stored.
   The exponent is moved, and then 2^112 too small. */
static inline float k_halff(const uint16_t h)
{
    const uint32_t u = (uint32_t)h;
    k_bits b;
    b.u = ((u & 0x8000u) << 16) | ((u & 0x7FFFu) << 13);
    return b.f * 5.192296858534827628530496329220096e33f;
}"""

_EXPM1_CORE = """\
/* e^r - 1 for |r| <= ln(2) / 2 */
static inline float k_expm1_core(const float r)
{
    float q = 1.3882488710805774e-3f;
    q = q * r + 8.366691879928112e-3f;
    q = q * r + 4.166720435023308e-2f;
    q = q * r + 1.6666541993618011e-1f;
    q = q * r + 4.999999701976776e-1f;
    return r + r * r * q;
}"""

_EXP = """\
/* e^x = 2^k e^r; 2^k in two factors, so that overflow and gradual underflow come out right */
static inline float k_expf(const float x)
{
    const float c = k_select(x < -104.0f, -104.0f, k_select(x > 89.0f, 89.0f, x));
    k_bits n, s, t;
    n.f = c * 1.44269504f + 12582912.0f; /* the low bits now hold k */
    const float k = n.f - 12582912.0f;
    const float r = (c - k * 0.693359375f) + k * 2.12194440e-4f;
    const uint32_t u = n.u - 0x4B400000u + 1024u;
    const uint32_t h = u >> 1;
    s.u = (h - 385u) << 23;
    t.u = (u - h - 385u) << 23;
    return ((k_expm1_core(r) + 1.0f) * s.f) * t.f;
}"""

_EXPM1 = """\
/* e^x - 1 = 2^k (e^r - 1) + (2^k - 1), halved inside so that 2^128 never appears */
static inline float k_expm1f(const float x)
{
    const float c = k_select(x < -20.0f, -20.0f, k_select(x > 89.0f, 89.0f, x));
    k_bits n, s;
    n.f = c * 1.44269504f + 12582912.0f;
    const float k = n.f - 12582912.0f;
    const float r = (c - k * 0.693359375f) + k * 2.12194440e-4f;
    s.u = (n.u - 0x4B400000u + 126u) << 23;
    const float y = (s.f * k_expm1_core(r) + (s.f - 0.5f)) * 2.0f;
    return k_select(x == 0.0f, x, y);
}"""

_TANH = """\
/* tanh|x| = t / (t + 2) with t = e^(2|x|) - 1; the sign is put back, so the function is odd to the bit */
static inline float k_tanhf(const float x)
{
    k_bits b, n, s, y;
    b.f = x;
    const uint32_t sign = b.u & 0x80000000u;
    b.u ^= sign;
    const float d = b.f + b.f;
    const float c = k_select(d > 20.0f, 20.0f, d);
    n.f = c * 1.44269504f + 12582912.0f;
    const float k = n.f - 12582912.0f;
    const float r = (c - k * 0.693359375f) + k * 2.12194440e-4f;
    s.u = (n.u - 0x4B400000u + 127u) << 23;
    const float t = s.f * k_expm1_core(r) + (s.f - 1.0f);
    y.f = t / (t + 2.0f);
    y.u |= sign;
    return y.f;
}"""

_SIGMOID = """\
static inline float k_sigmoidf(const float x)
{
    return 1.0f / (1.0f + k_expf(-x));
}"""

_LOG = """\
/* log x = k ln(2) + log(1 + f), 1 + f in [sqrt(1/2), sqrt(2)) */
static inline float k_logf(const float x)
{
    const float small = (float)(x < 1.17549435e-38f);
    k_bits b;
    b.f = x * (1.0f + small * 8388607.0f);
    const uint32_t e = (b.u - 0x3F3504F3u) & 0xFF800000u;
    b.u -= e;
    const float f = b.f - 1.0f;
    const float k = (float)(int32_t)e * 1.1920928955078125e-7f - small * 23.0f;
    float p = -7.628338038921356e-2f;
    p = p * f + 1.2765975296497345e-1f;
    p = p * f - 1.3164405524730682e-1f;
    p = p * f + 1.420145481824875e-1f;
    p = p * f - 1.66229248046875e-1f;
    p = p * f + 2.0001225173473358e-1f;
    p = p * f - 2.5000831484794617e-1f;
    p = p * f + 3.333333134651184e-1f;
    const float g = f * f;
    const float low = k * -2.12194440e-4f + (f * g * p - 0.5f * g);
    const float y = k * 0.693359375f + (f + low);
    const float y1 = k_select((x > 3.402823466e+38f) | (x != x), x, y);
    const float y2 = k_select(x == 0.0f, -INFINITY, y1);
    return k_select(x < 0.0f, NAN, y2);
}"""

_LOG1P = """\
/* log(1 + x) = log(u) + (rounding error of u) / u */
static inline float k_log1pf(const float x)
{
    const float u = 1.0f + x;
    const float d = k_select((u > 0.0f) & (u <= 3.402823466e+38f), (x - (u - 1.0f)) / u, 0.0f);
    return k_select(x == 0.0f, x, k_logf(u) + d);
}"""

_MAX = """\
static inline float k_maxf(const float a, const float b)
{
    return k_select((a > b) | (a != a), a, b);
}"""

_MIN = """\
static inline float k_minf(const float a, const float b)
{
    return k_select((a < b) | (a != a), a, b);
}"""

_ERF = """\
/* erf|x| = |x| P(x^2) up to 1, 1 - e^Q(|x|) beyond it; from 4 on it rounds to 1; odd to the bit */
static inline float k_erff(const float x)
{
    k_bits b, y;
    b.f = x;
    const uint32_t sign = b.u & 0x80000000u;
    b.u ^= sign;
    const float t = k_select(b.f > 4.0f, 4.0f, b.f);
    const float s = t * t;
    float p = 7.787423965055496e-05f;
    p = p * s - 0.0007991542806848884f;
    p = p * s + 0.005186376161873341f;
    p = p * s - 0.02685287781059742f;
    p = p * s + 0.11283565312623978f;
    p = p * s - 0.376126229763031f;
    p = p * s + 1.1283791065216064f;
    float q = 0.00018760483362711966f;
    q = q * t - 0.0029601145070046186f;
    q = q * t + 0.021889643743634224f;
    q = q * t - 0.1032182052731514f;
    q = q * t - 0.6380122303962708f;
    q = q * t - 1.1271716356277466f;
    q = q * t - 0.0003205736284144223f;
    y.f = k_select(t > 1.0f, 1.0f - k_expf(q), t * p);
    y.u |= sign;
    return y.f;
}"""

_GELU = """\
static inline float k_geluf(const float x)
{
    return 0.5f * x * (1.0f + k_erff(x * 0.70710678118654752f));
}"""

_GELU_TANH = """\
static inline float k_gelu_tanhf(const float x)
{
    return 0.5f * x * (1.0f + k_tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x)));
}"""

_SIGN = """\
static inline float k_signf(const float x)
{
    const float y = x > 0.0f ? 1.0f : 0.0f;
    return x < 0.0f ? -1.0f : y; /* NaN gives 0, as torch has it */
}"""

_REMAINDER = """\
/* with the sign of the divisor */
static inline float k_remainderf(const float x, const float y)
{
    const float r = fmodf(x, y);
    return r != 0.0f && (r < 0.0f) != (y < 0.0f) ? r + y : r;
}"""

_FLOOR_DIVIDE = """\
/* what is left is taken off before the division: 1 / 0.1f rounds to 10, but 0.1f goes into 1 only nine times */
static inline float k_floor_dividef(const float x, const float y)
{
    const float r = fmodf(x, y);
    const float q = (x - r) / y - (r != 0.0f && (r < 0.0f) != (y < 0.0f) ? 1.0f : 0.0f), whole = floorf(q);
    if (y == 0.0f) { return x / y; }
    return q - whole > 0.5f ? whole + 1.0f : whole;
}"""

_ELU = """\
static inline float k_eluf(const float x, const float alpha, const float scale, const float input_scale)
{
    const float e = alpha * k_expm1f(x * input_scale);
    return scale * k_select(x > 0.0f, x, e);
}"""

_SOFTPLUS = """\
static inline float k_softplusf(const float x, const float beta, const float threshold)
{
    const float y = k_log1pf(k_expf(x * beta)) / beta;
    return k_select(x * beta > threshold, x, y);
}"""

_SUM = """\
/* sum of n numbers in eight interleaved parts: shorter chains, smaller error */
static inline float k_sumf(const float *const x, const int n)
{
    float s[8] = {0.0f};
    const int whole = n - n % 8;
    for (int i = 0; i < whole; i += 8) {
        for (int j = 0; j < 8; ++j) { s[j] += x[i + j]; }
    }
    for (int i = whole; i < n; ++i) { s[0] += x[i]; }
    return ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]));
}"""

_SUM_SQUARES = """\
/* sum of (x - center)^2 */
static inline float k_sum_squaresf(const float *const x, const float center, const int n)
{
    float s[8] = {0.0f};
    const int whole = n - n % 8;
    for (int i = 0; i < whole; i += 8) {
        for (int j = 0; j < 8; ++j) {
            const float d = x[i + j] - center;
            s[j] += d * d;
        }
    }
    for (int i = whole; i < n; ++i) {
        const float d = x[i] - center;
        s[0] += d * d;
    }
    return ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]));
}"""

_VAR = """\
static inline float k_varf(const float *const x, const int n, const float correction)
{
    return k_sum_squaresf(x, k_sumf(x, n) / (float)n, n) / ((float)n - correction);
}"""

_PRODUCT = """\
static inline float k_productf(const float *const x, const int n)
{
    float p = 1.0f;
    for (int i = 0; i < n; ++i) { p *= x[i]; }
    return p;
}"""

_ARG = """\
/* index of the first extreme number; a NaN wins */
static inline int64_t k_arg_{name}f(const float *const x, const int n)
{{
    int best = 0;
    for (int i = 1; i < n; ++i) {{
        if (x[best] == x[best] && ((x[i] {sign} x[best]) || x[i] != x[i])) {{ best = i; }}
    }}
    return (int64_t)best;
}}"""

_ANY = """\
static inline unsigned char k_{name}(const unsigned char *const x, const int n)
{{
    int r = {start};
    for (int i = 0; i < n; ++i) {{ r {sign}= x[i] != 0; }}
    return (unsigned char)r;
}}"""

_TABLE: dict[str, tuple[str, tuple[str, ...]]] = {  # in the order they are written out
    "k_bits": (_BITS, ()),
    "k_select": (_SELECT, ("k_bits",)),
    "k_halff": (_HALF, ("k_bits",)),
    "k_expm1_core": (_EXPM1_CORE, ()),
    "k_expf": (_EXP, ("k_bits", "k_expm1_core", "k_select")),
    "k_expm1f": (_EXPM1, ("k_bits", "k_expm1_core", "k_select")),
    "k_tanhf": (_TANH, ("k_bits", "k_expm1_core", "k_select")),
    "k_sigmoidf": (_SIGMOID, ("k_expf",)),
    "k_logf": (_LOG, ("k_bits", "k_select")),
    "k_log1pf": (_LOG1P, ("k_logf", "k_select")),
    "k_maxf": (_MAX, ("k_select",)),
    "k_minf": (_MIN, ("k_select",)),
    "k_erff": (_ERF, ("k_bits", "k_expf", "k_select")),
    "k_geluf": (_GELU, ("k_erff",)),
    "k_gelu_tanhf": (_GELU_TANH, ("k_tanhf",)),
    "k_signf": (_SIGN, ()),
    "k_remainderf": (_REMAINDER, ()),
    "k_floor_dividef": (_FLOOR_DIVIDE, ()),
    "k_eluf": (_ELU, ("k_expm1f", "k_select")),
    "k_softplusf": (_SOFTPLUS, ("k_log1pf", "k_expf", "k_select")),
    "k_sumf": (_SUM, ()),
    "k_sum_squaresf": (_SUM_SQUARES, ()),
    "k_varf": (_VAR, ("k_sumf", "k_sum_squaresf")),
    "k_productf": (_PRODUCT, ()),
    "k_arg_maxf": (_ARG.format(name="max", sign=">"), ()),
    "k_arg_minf": (_ARG.format(name="min", sign="<"), ()),
    "k_any": (_ANY.format(name="any", start=0, sign="|"), ()),
    "k_all": (_ANY.format(name="all", start=1, sign="&"), ()),
}


def helpers_text(code: Iterable[str]) -> str:
    """Definitions of the helpers that ``code`` mentions and of those they need, each once, in a fixed order."""
    body = "\n".join(code)
    wanted = [name for name in _TABLE if f"{name}(" in body]
    needed: set[str] = set()
    while wanted:
        name = wanted.pop()
        if name not in needed:
            needed.add(name)
            wanted.extend(_TABLE[name][1])
    return "\n\n".join(text for name, (text, _) in _TABLE.items() if name in needed)
