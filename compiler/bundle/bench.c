/* Latency of @prefix@_step on this machine, hot and then paced: bench [calls] [rate_hz]. POSIX clocks. */
#define _POSIX_C_SOURCE 200809L
#include "@prefix@.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static double now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

static int ascending(const void *const a, const void *const b)
{
    const double x = *(const double *)a;
    const double y = *(const double *)b;
    return (x > y) - (x < y);
}

static void report(const char *const what, double *const us, const size_t n)
{
    qsort(us, n, sizeof us[0], ascending);
    printf("%s: %zu calls, p50 %.2f us, p99 %.2f us, p99.9 %.2f us, max %.2f us\n", what, n, us[n / 2],
           us[(n * 99) / 100], us[(n * 999) / 1000], us[n - 1]);
}

static void wait_until(const double t_us)
{
    while (now_us() < t_us) {
        struct timespec pause = {0, 20000};
        if (t_us - now_us() > 200.0) { nanosleep(&pause, NULL); }
    }
}

int main(const int argc, char **const argv)
{
    const size_t n = argc > 1 ? (size_t)strtoul(argv[1], NULL, 10) : 20000u;
    const double rate_hz = argc > 2 ? strtod(argv[2], NULL) : 0.0;
    static @prefix@_state st;
    static @prefix@_obs obs;
    static @prefix@_command command;
    double *const us = malloc((n > 0 ? n : 1) * sizeof us[0]);
    if (us == NULL || n == 0) { return 1; }
    @prefix@_init(&st);
    memset(&obs, 0, sizeof obs);
    for (size_t i = 0; i < n; ++i) {
        const double start = now_us();
        (void)@prefix@_step(&st, &obs, &command);
        us[i] = now_us() - start;
    }
    report("hot", us, n);
    if (rate_hz > 0.0) {
        const size_t m = n < 2000u ? n : 2000u;
        const double begin = now_us();
        for (size_t i = 0; i < m; ++i) {
            wait_until(begin + (double)i * 1e6 / rate_hz);
            const double start = now_us();
            (void)@prefix@_step(&st, &obs, &command);
            us[i] = now_us() - start;
        }
        report("paced", us, m);
    }
    free(us);
    return 0;
}
