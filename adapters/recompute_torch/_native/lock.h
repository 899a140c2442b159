// One lock for all records, and how it gets along with the interpreter's.
//
// What holds our lock may have to wait for the interpreter's: when the last reference to a Python object goes with a
// recipe, say. So nothing may wait for our lock with the interpreter's in hand, as a destructor of a tensor would, or
// `Tensor.numpy()`. Whoever has to wait gives it up meanwhile.

extern "C" {
__attribute__((weak)) int PyGILState_Check();
__attribute__((weak)) void* PyEval_SaveThread();
__attribute__((weak)) void PyEval_RestoreThread(void*);
__attribute__((weak)) int Py_IsInitialized();
}

using Mutex = std::recursive_mutex;
alignas(Mutex) char mutex_bytes[sizeof(Mutex)];
Mutex& mutex = *new (mutex_bytes) Mutex;  // never destroyed: storages may outlive every static

class WithoutInterpreter {  // its lock is given up while this exists, if this thread has it
 public:
  WithoutInterpreter() {
    if (PyGILState_Check && Py_IsInitialized() && PyGILState_Check()) thread_ = PyEval_SaveThread();
  }
  ~WithoutInterpreter() {
    if (thread_) PyEval_RestoreThread(thread_);
  }
  WithoutInterpreter(const WithoutInterpreter&) = delete;

 private:
  void* thread_ = nullptr;
};

class Lock {
 public:
  Lock() { take(); }
  ~Lock() { mutex.unlock(); }
  Lock(const Lock&) = delete;

  static void take() {
    if (mutex.try_lock()) return;
    const WithoutInterpreter here;
    mutex.lock();
  }
};

thread_local int inside = 0;  // operators that run in this thread below the fallback
