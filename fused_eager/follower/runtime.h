// The runtime's own objects that following reads and changes: where their slots are, and what is shared by all.

#pragma once

#include "objects.h"

namespace fused_eager {

struct BufferSlots {
  Slot array, born_native, cdata, epoch, error, home, origin, previous, storage, stream, vacant, vid;
};
struct StreamSlots {
  Slot at, config, ended, epoch, guess, inputs, natives, nodes, autotuner, pending, reads, backoff, unfinished, vids;
  Slot shadowed;
};
struct StepSlots {
  Slot call, compiled, depth, info, likely, node, operands, then, vids, warm;
};
struct NodeSlots {
  Slot place, results, scalars;
};
struct AutotunerSlots {
  Slot countdown, native, stepping, waiting;
};
struct BackoffSlots {
  Slot due, left;
};
struct DeviceInputSlots {
  Slot array, buffer, home, origin, vid;
};

// Filled once, by `connect`.
struct Runtime {
  BufferSlots buffer;
  StreamSlots stream;
  StepSlots step;
  NodeSlots node;
  AutotunerSlots autotuner;
  DeviceInputSlots read;
  BackoffSlots backoff;
  Slot native_vid;
  PyTypeObject *front_door = nullptr, *buffer_type = nullptr, *device_input_type = nullptr;
  PyTypeObject* place_type = nullptr;  // the line of an op, where somebody wants to know more than the line
  PyObject* table = nullptr;    // the storages whose value is not in their memory, by address
  PyObject* streams = nullptr;  // those that live, by weak reference
  PyObject* deferred = nullptr;  // what has been launched
  PyObject* site = nullptr;     // the names of that module
  PyObject *acquire = nullptr, *release = nullptr;  // the runtime's lock
  PyObject *native_input = nullptr, *open_native = nullptr, *must_stay = nullptr, *release_buffer = nullptr;
  PyObject *is_awaited = nullptr, *with_scalars = nullptr, *passed_to_other_device = nullptr;
  PyObject *treatment_of = nullptr, *settings_of = nullptr, *is_internal = nullptr, *count = nullptr;
  PyObject* was_read = nullptr;  // told of each read that is not overlooked
  PyObject* read_again = nullptr;  // reads what the trap has refused
  int64_t flags_at = 0;       // of the three flags in `StorageImpl` by which a storage is trapped
  void* unwritten = nullptr;  // where the addresses without memory begin
  int64_t unwritten_least = 0, unwritten_most = 0;  // bytes of the tensors that lie over them
  bool open = false;          // whether anything is followed here
};

inline Runtime R;

inline PyObject* name_of(const char* text) { return PyUnicode_InternFromString(text); }

}  // namespace fused_eager
