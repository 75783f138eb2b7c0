#include "common/log.h"

#include <atomic>
#include <cstdio>

namespace m3 {
namespace {

std::atomic<nvinfer1::ILoggerFinder*> logger_finder{nullptr};

}  // namespace

void set_logger_finder(nvinfer1::ILoggerFinder* finder) noexcept {
  logger_finder = finder;
}

void log(nvinfer1::ILogger::Severity severity, std::string const& text) noexcept {
  nvinfer1::ILogger* logger = nullptr;
  if (auto* finder = logger_finder.load()) logger = finder->findLogger();
  if (logger != nullptr) {
    logger->log(severity, text.c_str());
  } else if (severity <= nvinfer1::ILogger::Severity::kWARNING) {
    std::fprintf(stderr, "%s\n", text.c_str());
  }
}

}  // namespace m3
