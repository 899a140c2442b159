// What is asked of Python meanwhile: to run handlers of signals, while a long history comes back, which Ctrl-C can end;
// to look whether it is worth a warning how much is repeated; and whether a storage belongs to a block of Python's.

extern "C" {
__attribute__((weak)) int PyGILState_Ensure();
__attribute__((weak)) void PyGILState_Release(int);
__attribute__((weak)) int PyErr_CheckSignals();
__attribute__((weak)) void PyErr_Clear();
__attribute__((weak)) void PyErr_Fetch(_object**, _object**, _object**);
__attribute__((weak)) void PyErr_NormalizeException(_object**, _object**, _object**);
__attribute__((weak)) _object* PyObject_CallNoArgs(_object*);
__attribute__((weak)) _object* PyObject_Str(_object*);
__attribute__((weak)) const char* PyUnicode_AsUTF8(_object*);
__attribute__((weak)) void Py_DecRef(_object*);
}

constexpr uint32_t TURNS = 64;  // between two looks at the time
constexpr auto PAUSE = std::chrono::milliseconds(50);  // between two looks for signals: the interpreter may be busy

thread_local _object* raised = nullptr;  // by the last handler that did in this thread

struct Interrupted final : torch::PyTorchError {
  Interrupted(std::string text, _object* type) : PyTorchError(std::move(text)), type(type) {}
  _object* python_type() override { return type; }
  _object* const type;
};

template <class F>
void in_python(F&& fails) {  // with the interpreter's lock; the exception that it leaves there is ours from then on
  const int interpreter = PyGILState_Ensure();
  std::string text;
  _object *type = nullptr, *error = nullptr, *traceback = nullptr;
  if (fails()) {
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    _object* words = PyObject_Str(error);
    if (const char* known = words ? PyUnicode_AsUTF8(words) : nullptr) text = known;
    PyErr_Clear();
    for (_object* last : {words, traceback, std::exchange(raised, error)}) Py_DecRef(last);
  }
  PyGILState_Release(interpreter);
  if (type) throw Interrupted(text, type);
}

void run_handlers() {  // in the main thread: in others there are none
  static thread_local uint32_t turns = 0;
  static thread_local std::chrono::steady_clock::time_point next;
  if (++turns % TURNS || lenient || !PyErr_CheckSignals || !Py_IsInitialized()) return;
  const auto now = std::chrono::steady_clock::now();
  if (now < next) return;
  next = now + PAUSE;
  in_python([] { return PyErr_CheckSignals() != 0; });
}

_object* looker = nullptr;       // of the block that is open: a function of Python
constexpr int64_t OFTEN = 1000;  // repeats between two looks

void call(_object* function) {
  if (!PyObject_CallNoArgs || !Py_IsInitialized()) return;
  in_python([&] {
    _object* none = PyObject_CallNoArgs(function);
    if (none) Py_DecRef(none);
    return !none;
  });
}

// Storages that blocks of the Python path have met while this one is open. It never hears of their end, so whether one
// still belongs there is asked.
std::unordered_set<StorageImpl*>& others = *new std::unordered_set<StorageImpl*>;
_object* keeper = nullptr;  // a function of Python: raises an error if `asked` belongs to another block
StorageImpl* asked = nullptr;

void refuse_what_others_have(StorageImpl* storage) {
  if (C10_LIKELY(others.empty()) || !others.count(storage)) return;
  asked = storage;
  call(keeper);
  others.erase(storage);
}

void look_at_repeats() {
  if (C10_LIKELY(M.repeats < M.next_look)) return;
  {
    Lock lock;
    M.next_look = M.repeats + OFTEN;
  }
  if (!lenient) call(looker);
}
