// An NVRTC that compiles nothing: libnvrtc.so.12 of the tests, quick and everywhere. A kernel's name in its image is
// the one that it was asked for by, and the fake driver has the kernel's twin. The variables say what other NVRTCs are.
#include <elf.h>

#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "fake.h"

namespace {

using shardow::fake::number_from;

struct Program {
  std::vector<std::string> names;
  std::string image;
};

int give(const std::string& text, char* to) {
  std::memcpy(to, text.data(), text.size());
  return 0;
}

const std::string log_text = "shardow.cu(1): error: as the test wished";

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

int nvrtcVersion(int* major, int* minor) {
  *major = number_from("FAKE_NVRTC_MAJOR", 12);
  *minor = 4;
  return 0;
}
int nvrtcGetNumSupportedArchs(int* count) {
  *count = 2;
  return 0;
}
int nvrtcGetSupportedArchs(int* architectures) {
  architectures[0] = 75;
  architectures[1] = 90;
  return 0;
}
int nvrtcCreateProgram(Program** program, const char*, const char*, int, const char* const*, const char* const*) {
  *program = new Program;
  return 0;
}
int nvrtcDestroyProgram(Program** program) {
  delete *program;
  return 0;
}
int nvrtcAddNameExpression(Program* program, const char* name) {
  program->names.emplace_back(name);
  return 0;
}
int nvrtcCompileProgram(Program* program, int count, const char* const* options) {
  Elf64_Ehdr header{};
  std::memcpy(header.e_ident, ELFMAG, SELFMAG);
  header.e_ident[EI_ABIVERSION] = 7;
  std::string names;
  for (const std::string& name : program->names) names += name + '\n';
  header.e_shoff = sizeof(header) + names.size();
  bool ptx = false;
  for (int i = 0; i < count; ++i) {
    ptx = ptx || std::strstr(options[i], "compute_") != nullptr;
    if (const char* const code = std::strstr(options[i], "sm_"))
      header.e_flags = static_cast<Elf64_Word>(std::atoi(code + 3));
  }
  program->image = ptx ? ".version\n" : std::string(reinterpret_cast<const char*>(&header), sizeof(header));
  program->image += names + '\0';
  return number_from("FAKE_NVRTC_STATUS", 0);
}
int nvrtcGetProgramLogSize(Program*, size_t* bytes) {
  *bytes = log_text.size();
  return 0;
}
int nvrtcGetProgramLog(Program*, char* text) {
  return give(log_text, text);
}
int nvrtcGetCUBINSize(Program* program, size_t* bytes) {
  *bytes = program->image.size();
  return 0;
}
int nvrtcGetCUBIN(Program* program, char* image) {
  return give(program->image, image);
}
int nvrtcGetPTXSize(Program* program, size_t* bytes) {
  return nvrtcGetCUBINSize(program, bytes);
}
int nvrtcGetPTX(Program* program, char* image) {
  return give(program->image, image);
}
int nvrtcGetLoweredName(Program* program, const char* name, const char** lowered) {
  for (const std::string& known : program->names) {
    if (known == name) *lowered = known.c_str();
  }
  return 0;
}
}
