// The one exception of this library: bad input, told to the user as it is.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace jaxtap {

enum class ErrorKind {
  kInvalidArgument,     // what was given can never work: shapes, dtypes, corrupted weights
  kFailedPrecondition,  // it can't work here and now: this machine or this configuration
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

namespace error_detail {
template <typename... Parts>
std::string join(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}
}  // namespace error_detail

// The message is what the parts print, one after the other.
template <typename... Parts>
Error invalid_argument(const Parts&... parts) {
  return Error(ErrorKind::kInvalidArgument, error_detail::join(parts...));
}

template <typename... Parts>
Error failed_precondition(const Parts&... parts) {
  return Error(ErrorKind::kFailedPrecondition, error_detail::join(parts...));
}

}  // namespace jaxtap
