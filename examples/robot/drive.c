/* Drives the robot with a bundle's C policy: drive HOST PORT. POSIX sockets; no heap.
 *
 * cc -std=c99 -O3 -I BUNDLE/c drive.c plain.c BUNDLE/c/policy.c -lm -o drive      (arm.c for the arm)
 *
 * The robot says its names in its order; find_sensor and find_actuator know the policy's. Nothing goes by place. */
#define _POSIX_C_SOURCE 200809L
#include "drive.h"
#include "protocol.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

enum { MOST_NAMES = 8192, TRIES = 50, PATIENCE_S = 10 };

static policy_state state;
static policy_obs obs;
static policy_command command;
static float *into[MOST_NAMES];       /* for each sensor of the robot, its place in obs; NULL: not read */
static const float *from[MOST_NAMES]; /* for each actuator, its place in command */
static unsigned sensors;
static unsigned actuators;
static unsigned char buffer[LARGEST + 1];
static unsigned char answer[HEADER_BYTES + 4 * MOST_NAMES];
static unsigned char contract[8];

static uint64_t now_ns(void)
{
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static int fail(const char *const what, const char *const detail)
{
    fprintf(stderr, "error: %s%s\n", what, detail);
    return 1;
}

static void wait_at_most(const int wire, const long milliseconds)
{
    const struct timeval limit = {milliseconds / 1000, (milliseconds % 1000) * 1000};
    (void)setsockopt(wire, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
}

/* A whole packet into buffer, its payload closed with a zero; 0 where none came in time or it is none of ours. */
static int receive(const int wire, packet_header *const h)
{
    const ssize_t bytes = recv(wire, buffer, LARGEST, 0);
    if (bytes < 0 || !unpack(buffer, (size_t)bytes, h)) { return 0; }
    buffer[bytes] = 0;
    return 1;
}

/* The rate, and where each of the robot's entries belongs. */
static int match(char *text)
{
    double rate_hz = 0.0;
    size_t read = 0;
    if (sscanf(text, "%lf %u %u", &rate_hz, &sensors, &actuators) != 3 || sensors > MOST_NAMES ||
        actuators > MOST_NAMES) {
        return fail("the robot's welcome is damaged", "");
    }
#ifdef POLICY_RATE_HZ
    if (rate_hz > POLICY_RATE_HZ * 1.000001 || rate_hz < POLICY_RATE_HZ * 0.999999) {
        return fail("the robot runs at another rate than the policy", "");
    }
#endif
    for (unsigned i = 0; i < sensors + actuators; ++i) {
        text = strchr(text, '\n');
        if (text == NULL) { return fail("the robot's welcome has too few names", ""); }
        *text++ = '\0';
        char *const end = strchr(text, '\n');
        if (end != NULL) { *end = '\0'; }
        if (i < sensors) {
            into[i] = find_sensor(&obs, text);
            read += into[i] != NULL;
        } else {
            from[i - sensors] = find_actuator(&command, text);
            if (from[i - sensors] == NULL) { return fail("the policy does not move the robot's actuator ", text); }
        }
        if (end != NULL) { *end = '\n'; }
    }
    if (read != sizeof obs / sizeof(float)) { return fail("the robot lacks a sensor that the policy reads", ""); }
    if (actuators != sizeof command / sizeof(float)) { return fail("the policy moves more than the robot has", ""); }
    return 0;
}

static int meet(const int wire)
{
    packet_header hello = {HELLO, 0, {0}, 0, 0, 0, 0};
    packet_header h;
    unsigned char bytes[HEADER_BYTES];
    memcpy(hello.contract, contract, sizeof contract);
    wait_at_most(wire, 200);
    for (int i = 0; i < TRIES; ++i) {
        hello.stamp_ns = now_ns();
        pack(&hello, bytes);
        errno = 0;
        if (send(wire, bytes, sizeof bytes, 0) >= 0 && receive(wire, &h)) {
            if (h.kind == REFUSE) { return fail("the robot refuses: ", (const char *)buffer + HEADER_BYTES); }
            if (h.kind == WELCOME && memcmp(h.contract, contract, 8) == 0) {
                return match((char *)buffer + HEADER_BYTES);
            }
        }
        if (errno == ECONNREFUSED) { /* not up yet */
            const struct timespec pause = {0, 200000000};
            (void)nanosleep(&pause, NULL);
        }
    }
    return fail("no robot answered", "");
}

/* One observation to its action, in answer; a repeated observation is answered again without a step. */
static unsigned step(const packet_header *const h, const int again)
{
    static uint32_t status;
    if (!again) {
        if (h->flags & START) { policy_reset(&state); }
        for (unsigned i = 0; i < sensors; ++i) {
            if (into[i] != NULL) { *into[i] = get_float(buffer + HEADER_BYTES + 4 * i); }
        }
        status = policy_step(&state, &obs, &command);
        for (unsigned i = 0; i < actuators; ++i) { put_float(answer + HEADER_BYTES + 4 * i, *from[i]); }
    }
    packet_header out = {ACTION, status, {0}, h->sequence, 4u * actuators, 0, h->stamp_ns};
    memcpy(out.contract, contract, sizeof contract);
    out.stamp_ns = now_ns();
    pack(&out, answer);
    return status;
}

static int drive(const int wire)
{
    packet_header h;
    uint32_t last = 0;
    unsigned long steps = 0;
    unsigned status = 0;
    double longest_us = 0.0;
    double total_us = 0.0;
    wait_at_most(wire, 1000L * PATIENCE_S);
    for (;;) {
        errno = 0;
        if (!receive(wire, &h)) {
            if (errno != 0) { return fail("the robot fell silent", ""); }
            continue;
        }
        const uint64_t begin = now_ns();
        if (h.kind == BYE) { break; }
        if (h.kind != OBSERVATION || memcmp(h.contract, contract, 8) != 0 || h.size != 4u * sensors) { continue; }
        const int again = steps > 0 && h.sequence == last;
        status |= step(&h, again);
        if (send(wire, answer, HEADER_BYTES + 4u * actuators, 0) < 0) { return fail("the robot is gone", ""); }
        steps += !again;
        last = h.sequence;
        const double us = (double)(now_ns() - begin) * 1e-3;
        total_us += us;
        longest_us = us > longest_us ? us : longest_us;
    }
    printf("driver: %lu steps, status %u, mean %.1f us, max %.1f us\n", steps, status,
           steps > 0 ? total_us / (double)steps : 0.0, longest_us);
    return 0;
}

int main(const int argc, char **const argv)
{
    if (argc != 3) { return fail("usage: drive HOST PORT", ""); }
    struct sockaddr_in robot;
    memset(&robot, 0, sizeof robot);
    robot.sin_family = AF_INET;
    robot.sin_port = htons((uint16_t)strtoul(argv[2], NULL, 10));
    if (inet_pton(AF_INET, argv[1], &robot.sin_addr) != 1) { return fail("not an IPv4 address: ", argv[1]); }
    for (int i = 0; i < 8; ++i) {
        unsigned byte = 0;
        (void)sscanf(policy_contract_hash() + 2 * i, "%2x", &byte);
        contract[i] = (unsigned char)byte;
    }
    policy_init(&state);
    const int wire = socket(AF_INET, SOCK_DGRAM, 0);
    if (wire < 0 || connect(wire, (const struct sockaddr *)&robot, sizeof robot) != 0) {
        return fail("no socket: ", strerror(errno));
    }
    const int result = meet(wire) || drive(wire);
    (void)close(wire);
    return result;
}
