/* @prefix@_selftest: replays the golden vectors. Compiled with -D@PREFIX@_SELFTEST_MAIN this file is a program. */
#include "@prefix@.h"
#include "@prefix@_golden.h"

#include <math.h>
#include <string.h>

static double distance(const double got, const double wanted)
{
    return got > wanted ? got - wanted : wanted - got;
}

int32_t @prefix@_selftest(@prefix@_state *const st)
{
    int32_t failures = 0;
    for (int row = 0; row < @PREFIX@_GOLDEN_ROWS; ++row) {
        @prefix@_obs obs;
        @prefix@_command command;
        int bad = 0;
        @prefix@_init(st);
@load@
        if ((@prefix@_step(st, &obs, &command) & @PREFIX@_STATUS_NON_FINITE_INPUT) != 0u) { bad = 1; }
@compare@
        failures += bad;
    }
    return failures;
}

#ifdef @PREFIX@_SELFTEST_MAIN
#include <stdio.h>

int main(void)
{
    static @prefix@_state st;
    const int32_t failures = @prefix@_selftest(&st);
    printf("%d of %d golden rows failed\n", (int)failures, @PREFIX@_GOLDEN_ROWS);
    return failures == 0 ? 0 : 1;
}
#endif
