#include "core.h"

NB_MODULE(_core, m) {
  shardow::python::bind_engine(m);
}
