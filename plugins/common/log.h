#pragma once

#include <NvInferRuntime.h>

#include <string>

namespace m3 {

// The finder that TensorRT hands over through the exported setLoggerFinder; nullptr takes it back.
void set_logger_finder(nvinfer1::ILoggerFinder* finder) noexcept;

// Writes to TensorRT's logger, or to stderr (warnings and worse) while there is none.
void log(nvinfer1::ILogger::Severity severity, std::string const& text) noexcept;

}  // namespace m3
