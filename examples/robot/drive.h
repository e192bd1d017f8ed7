/* What drive.c must be told of a policy: where in its structs a robot's sensor goes and an actuator's number comes from. */
#ifndef ROBOT_DRIVE_H
#define ROBOT_DRIVE_H

#include "policy.h"

/* The entry for a sensor's name; NULL for one that the policy does not read. */
float *find_sensor(policy_obs *obs, const char *name);

/* The entry for an actuator's name; NULL for one that the policy does not move. */
const float *find_actuator(const policy_command *command, const char *name);

#endif
