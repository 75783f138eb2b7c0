#include "common/log.h"

#include <cxxabi.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <typeinfo>

namespace m3 {

using nvinfer1::ILogger;
using nvinfer1::ILoggerFinder;

// In later releases (seen in TensorRT-RTX 1.6 and 1.7 and TensorRT 11.4) both interfaces derive
// from IVersionedInterface, which moves their one method behind that class's virtuals. Not in the
// anonymous namespace: there the compiler would conclude that nobody implements them.
struct VersionedLogger : nvinfer1::IVersionedInterface {
  virtual void log(ILogger::Severity severity, nvinfer1::AsciiChar const* text) noexcept = 0;
};
struct VersionedLoggerFinder : nvinfer1::IVersionedInterface {
  virtual ILogger* findLogger() = 0;
};

namespace {

bool derives_from(std::type_info const& type, std::type_info const& base) {
  if (type == base) return true;
  if (auto const* single = dynamic_cast<abi::__si_class_type_info const*>(&type)) {
    return derives_from(*single->__base_type, base);
  }
  if (auto const* several = dynamic_cast<abi::__vmi_class_type_info const*>(&type)) {
    return std::any_of(several->__base_info, several->__base_info + several->__base_count,
                       [&](auto const& info) { return derives_from(*info.__base_type, base); });
  }
  return false;
}

// The headers that we compile against cannot say which kind the running library hands over; the
// object's own type information can.
template <class Interface>
bool is_versioned(Interface* object) {
  return derives_from(typeid(*object), typeid(nvinfer1::IVersionedInterface));
}

std::atomic<ILoggerFinder*> logger_finder{nullptr};

ILogger* find_logger() {
  ILoggerFinder* finder = logger_finder.load();
  if (finder == nullptr) return nullptr;
  if (!is_versioned(finder)) return finder->findLogger();
  return reinterpret_cast<VersionedLoggerFinder*>(finder)->findLogger();
}

}  // namespace

void set_logger_finder(ILoggerFinder* finder) noexcept {
  logger_finder = finder;
}

void log(ILogger::Severity severity, std::string const& text) noexcept {
  ILogger* logger = find_logger();
  if (logger == nullptr) {
    if (severity <= ILogger::Severity::kWARNING) std::fprintf(stderr, "%s\n", text.c_str());
  } else if (is_versioned(logger)) {
    reinterpret_cast<VersionedLogger*>(logger)->log(severity, text.c_str());
  } else {
    logger->log(severity, text.c_str());
  }
}

}  // namespace m3
