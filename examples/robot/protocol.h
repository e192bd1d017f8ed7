/* The packets of protocol.py, which documents them, in C99. No alignment or byte order of the machine is relied upon. */
#ifndef ROBOT_PROTOCOL_H
#define ROBOT_PROTOCOL_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { HELLO = 1, WELCOME, REFUSE, OBSERVATION, ACTION, BYE };
enum { VERSION = 1, START = 1, HEADER_BYTES = 40, LARGEST = 65507 };

typedef struct {
    unsigned kind;
    unsigned flags;
    unsigned char contract[8];
    uint32_t sequence;
    uint32_t size; /* payload bytes */
    uint64_t stamp_ns;
    uint64_t answers_ns;
} packet_header;

static void put(unsigned char *const at, uint64_t value, const int bytes)
{
    for (int i = 0; i < bytes; ++i) {
        at[i] = (unsigned char)(value & 255u);
        value >>= 8;
    }
}

static uint64_t get(const unsigned char *const at, const int bytes)
{
    uint64_t value = 0;
    for (int i = bytes - 1; i >= 0; --i) { value = (value << 8) | at[i]; }
    return value;
}

static void put_float(unsigned char *const at, const float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    put(at, bits, 4);
}

static float get_float(const unsigned char *const at)
{
    const uint32_t bits = (uint32_t)get(at, 4);
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static void pack(const packet_header *const h, unsigned char *const at)
{
    memcpy(at, "GRLR", 4);
    at[4] = VERSION;
    put(at + 5, h->kind, 1);
    put(at + 6, h->flags, 2);
    memcpy(at + 8, h->contract, 8);
    put(at + 16, h->sequence, 4);
    put(at + 20, h->size, 4);
    put(at + 24, h->stamp_ns, 8);
    put(at + 32, h->answers_ns, 8);
}

/* 0 where the bytes are no whole packet of this protocol and version. */
static int unpack(const unsigned char *const at, const size_t bytes, packet_header *const h)
{
    if (bytes < HEADER_BYTES || memcmp(at, "GRLR", 4) != 0 || at[4] != VERSION) { return 0; }
    h->kind = at[5];
    h->flags = (unsigned)get(at + 6, 2);
    memcpy(h->contract, at + 8, 8);
    h->sequence = (uint32_t)get(at + 16, 4);
    h->size = (uint32_t)get(at + 20, 4);
    h->stamp_ns = get(at + 24, 8);
    h->answers_ns = get(at + 32, 8);
    return bytes == (size_t)HEADER_BYTES + h->size;
}

#endif
