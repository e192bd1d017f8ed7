"""Headers with the few names of ROS 2 that the templates use, so that a compiler can check their syntax and types."""

STRUCTS = """#pragma once
#include <memory>
#include <string>
#include <vector>
namespace std_msgs::msg {
struct Header { int stamp; };
struct Float32MultiArray {
  using ConstSharedPtr = std::shared_ptr<const Float32MultiArray>;
  std::vector<float> data;
};
}
namespace sensor_msgs::msg {
struct JointState {
  using ConstSharedPtr = std::shared_ptr<const JointState>;
  std_msgs::msg::Header header;
  std::vector<std::string> name;
  std::vector<double> position, velocity, effort;
};
}
"""

RCLCPP = """#pragma once
#include <chrono>
#include <functional>
#include "structs.hpp"
namespace rclcpp {
struct Logger {};
struct Clock {};
struct Time {};
struct Duration {};
struct SensorDataQoS {};
struct SubscriptionBase { using SharedPtr = std::shared_ptr<SubscriptionBase>; };
struct TimerBase { using SharedPtr = std::shared_ptr<TimerBase>; };
template <typename T> struct Publisher { using SharedPtr = std::shared_ptr<Publisher>; void publish(const T&); };
class Node {
 public:
  explicit Node(const std::string&);
  template <typename T, typename F>
  SubscriptionBase::SharedPtr create_subscription(const std::string&, SensorDataQoS, F f)
  {
    std::function<void(typename T::ConstSharedPtr)> check = f;
    return nullptr;
  }
  template <typename T> std::shared_ptr<Publisher<T>> create_publisher(const std::string&, int);
  TimerBase::SharedPtr create_wall_timer(std::chrono::nanoseconds, std::function<void()>);
  Logger get_logger() const;
  std::shared_ptr<Clock> get_clock();
  int now() const;
};
void init(int, char**);
void spin(std::shared_ptr<Node>);
void shutdown();
}
void log_it(rclcpp::Logger, const char*, ...);
#define RCLCPP_WARN_THROTTLE(logger, clock, ms, ...) (static_cast<void>(clock), log_it(logger, __VA_ARGS__))
#define RCLCPP_ERROR(logger, ...) log_it(logger, __VA_ARGS__)
"""

CONTROLLER = """#pragma once
#include "rclcpp/rclcpp.hpp"
namespace rclcpp_lifecycle {
struct State {};
struct LifecycleNode { rclcpp::Logger get_logger() const; };
}
namespace controller_interface {
enum class CallbackReturn { SUCCESS, ERROR };
enum class return_type { OK, ERROR };
enum class interface_configuration_type { INDIVIDUAL };
struct InterfaceConfiguration { interface_configuration_type type; std::vector<std::string> names; };
struct Interface { std::string get_name() const; double get_value() const; void set_value(double); };
class ControllerInterface {
 public:
  virtual ~ControllerInterface() = default;
  virtual CallbackReturn on_init() = 0;
  virtual InterfaceConfiguration command_interface_configuration() const = 0;
  virtual InterfaceConfiguration state_interface_configuration() const = 0;
  virtual CallbackReturn on_configure(const rclcpp_lifecycle::State&) = 0;
  virtual CallbackReturn on_activate(const rclcpp_lifecycle::State&) = 0;
  virtual CallbackReturn on_deactivate(const rclcpp_lifecycle::State&) = 0;
  virtual return_type update(const rclcpp::Time&, const rclcpp::Duration&) = 0;
  unsigned get_update_rate() const;
  std::shared_ptr<rclcpp_lifecycle::LifecycleNode> get_node() const;
  std::vector<Interface> command_interfaces_, state_interfaces_;
};
}
"""

HEADERS = {
    "structs.hpp": STRUCTS,
    "rclcpp/rclcpp.hpp": RCLCPP,
    "sensor_msgs/msg/joint_state.hpp": '#include "structs.hpp"\n',
    "std_msgs/msg/float32_multi_array.hpp": '#include "structs.hpp"\n',
    "controller_interface/controller_interface.hpp": CONTROLLER,
    "pluginlib/class_list_macros.hpp": "#define PLUGINLIB_EXPORT_CLASS(a, b) static_assert(sizeof(a) > 0);\n",
}
