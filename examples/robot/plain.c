/* A policy without names: sensors observation[i], actuators action_i, as those trained on a Gymnasium id have them. */
#include "drive.h"

#include <stdio.h>

static int entry(const char *const name, const char *const format, const size_t size)
{
    for (size_t i = 0; i < size; ++i) {
        char wanted[64];
        (void)snprintf(wanted, sizeof wanted, format, (unsigned)i);
        for (size_t c = 0; name[c] == wanted[c]; ++c) {
            if (name[c] == '\0') { return (int)i; }
        }
    }
    return -1;
}

float *find_sensor(policy_obs *const obs, const char *const name)
{
    const int i = entry(name, "observation[%u]", sizeof obs->observation / sizeof obs->observation[0]);
    return i < 0 ? NULL : &obs->observation[i];
}

const float *find_actuator(const policy_command *const command, const char *const name)
{
    const int i = entry(name, "action_%u", sizeof command->action / sizeof command->action[0]);
    return i < 0 ? NULL : &command->action[i];
}
