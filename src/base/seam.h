// What this process asks of its machine goes through interfaces whose default is the machine itself. An operation that
// is given another one (file/environment.h) opens a Scope; what it does on its thread then goes there, and what other
// threads do does not.
#pragma once

namespace shardow::base {

template <class T>
class Seam {
 public:
  /// Where this thread's calls go: the innermost Scope's, else the machine.
  static T& here() noexcept { return passed_in_ != nullptr ? *passed_in_ : machine(); }

  class Scope {
   public:
    explicit Scope(T* passed_in) noexcept : before_(passed_in_) {  ///< nullptr: as it was
      if (passed_in != nullptr) passed_in_ = passed_in;
    }
    ~Scope() { passed_in_ = before_; }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    T* before_;
  };

 private:
  static T& machine() noexcept {
    static T real;
    return real;
  }
  static inline thread_local T* passed_in_ = nullptr;
};

}  // namespace shardow::base
