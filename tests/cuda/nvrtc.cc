// An NVRTC that compiles nothing: libnvrtc.so.12 of the tests, quick and everywhere. A kernel's name in its image is
// the one that it was asked for by, and the fake driver has the kernel's twin. The variables say what other NVRTCs are.
#include <elf.h>

#include <cstring>
#include <string>
#include <vector>

#include "fake.h"

namespace {

using namespace shardow::fake;

struct Program {
  std::vector<std::string> names;
  std::string image;
};

const std::string log_text = "shardow.cu(1): error: as the test wished";

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

int nvrtcVersion(int* major, int* minor) {
  return give(major, number_from("FAKE_NVRTC_MAJOR", 12)) + give(minor, 4);
}
int nvrtcGetNumSupportedArchs(int* count) {
  return give(count, 2);
}
int nvrtcGetSupportedArchs(int* architectures) {
  return give(&architectures[0], 75) + give(&architectures[1], 90);
}
int nvrtcCreateProgram(Program** program, const char*, const char*, int, const char* const*, const char* const*) {
  return give(program, new Program);
}
int nvrtcDestroyProgram(Program** program) {
  delete *program;
  return 0;
}
int nvrtcAddNameExpression(Program* program, const char* name) {
  program->names.emplace_back(name);
  return 0;
}
int nvrtcCompileProgram(Program* program, int, const char* const* options) {
  Elf64_Ehdr header{};
  std::memcpy(header.e_ident, ELFMAG, SELFMAG);
  header.e_ident[EI_ABIVERSION] = 7;
  std::string names;
  for (const std::string& name : program->names) names += name + '\n';
  header.e_shoff = sizeof(header) + names.size();
  const std::string target = options[1];  // "--gpu-architecture=sm_90"
  header.e_flags = static_cast<Elf64_Word>(std::stoi(target.substr(target.rfind('_') + 1)));
  const bool ptx = target.find("compute_") != target.npos;
  program->image = ptx ? ".version\n" : std::string(reinterpret_cast<const char*>(&header), sizeof(header));
  program->image += names + '\0';
  return number_from("FAKE_NVRTC_STATUS", 0);
}
int nvrtcGetProgramLogSize(Program*, size_t* bytes) {
  return give(bytes, log_text.size());
}
int nvrtcGetProgramLog(Program*, char* text) {
  return log_text.copy(text, log_text.size()) == 0;
}
int nvrtcGetCUBINSize(Program* program, size_t* bytes) {
  return give(bytes, program->image.size());
}
int nvrtcGetCUBIN(Program* program, char* image) {
  return program->image.copy(image, program->image.size()) == 0;
}
int nvrtcGetPTXSize(Program*, size_t*) __attribute__((alias("nvrtcGetCUBINSize")));
int nvrtcGetPTX(Program*, char*) __attribute__((alias("nvrtcGetCUBIN")));
int nvrtcGetLoweredName(Program* program, const char* name, const char** lowered) {
  for (const std::string& known : program->names) {
    if (known == name) *lowered = known.c_str();
  }
  return 0;
}
}
