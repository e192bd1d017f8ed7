/* The arm's policy: its entries by the names of its contract. POLICY_KEY__NAME in policy.h is the place of each. */
#include "drive.h"

#include <string.h>

float *find_sensor(policy_obs *const obs, const char *const name)
{
    const struct {
        const char *name;
        float *entry;
    } entries[] = {
        {"joint_position/waist", &obs->joint_position[POLICY_joint_position__waist]},
        {"joint_position/shoulder", &obs->joint_position[POLICY_joint_position__shoulder]},
        {"joint_position/elbow", &obs->joint_position[POLICY_joint_position__elbow]},
        {"joint_position/wrist", &obs->joint_position[POLICY_joint_position__wrist]},
        {"joint_velocity/waist", &obs->joint_velocity[POLICY_joint_velocity__waist]},
        {"joint_velocity/shoulder", &obs->joint_velocity[POLICY_joint_velocity__shoulder]},
        {"joint_velocity/elbow", &obs->joint_velocity[POLICY_joint_velocity__elbow]},
        {"joint_velocity/wrist", &obs->joint_velocity[POLICY_joint_velocity__wrist]},
        {"target/waist", &obs->target[POLICY_target__waist]},
        {"target/shoulder", &obs->target[POLICY_target__shoulder]},
        {"target/elbow", &obs->target[POLICY_target__elbow]},
        {"target/wrist", &obs->target[POLICY_target__wrist]},
    };
    for (size_t i = 0; i < sizeof entries / sizeof entries[0]; ++i) {
        if (strcmp(name, entries[i].name) == 0) { return entries[i].entry; }
    }
    return NULL;
}

const float *find_actuator(const policy_command *const command, const char *const name)
{
    if (strcmp(name, "waist") == 0) { return &command->action[POLICY_action__waist]; }
    if (strcmp(name, "shoulder") == 0) { return &command->action[POLICY_action__shoulder]; }
    if (strcmp(name, "elbow") == 0) { return &command->action[POLICY_action__elbow]; }
    if (strcmp(name, "wrist") == 0) { return &command->action[POLICY_action__wrist]; }
    return NULL;
}
