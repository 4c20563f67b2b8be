/* The short way of a repeated call in C; `repeat.py` says what these functions do, and does the same without them.
 *
 * Built against CPython's stable ABI, and against nothing of PyTorch's or TVM's: tensors are looked at through the
 * function table that DLPack defines for this (`__dlpack_c_exchange_api__`, a stable C ABI).
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

/* ---- DLPack 1.3, as far as it is read here ---------------------------------------------------------------------- */

typedef struct {
  void *data;
  struct {
    int32_t type, id;
  } device;
  int32_t ndim;
  struct {
    uint8_t code, bits;
    uint16_t lanes;
  } dtype;
  int64_t *shape, *strides;
  uint64_t byte_offset;
} Tensor;

typedef struct Exchange {
  struct {
    uint32_t major, minor;
  } version;
  struct Exchange *before;
  void *allocate, *managed_from_object, *object_from_managed;
  int (*tensor_from_object)(void *object, Tensor *found);
  void *current_stream;
} Exchange;

/* REVISION is `repeat.REVISION`: both change where what Python expects of these functions does. */
enum { REVISION = 4, MAJOR = 1, ALIGNED = 16, MOST_WORDS = 256, HEADER = 3, FREE_BITS = 31 };

/* ---- what `prepare` was told ------------------------------------------------------------------------------------ */

static PyObject *tensor_type, *is_negated, *empty_like, *count_modes, *tracing, *forward_ad, *needs_gradient, *level;
static const Exchange *exchange;

static int truth(PyObject *value) { /* of a new reference, which is dropped; -1: an error */
  if (value == NULL) return -1;
  int found = value == Py_True ? 1 : value == Py_False ? 0 : PyObject_IsTrue(value);
  Py_DECREF(value);
  return found;
}

static int looked_at(PyObject *object, Tensor *found) { /* whether it is a tensor with data */
  if ((PyObject *)Py_TYPE(object) != tensor_type) return 0;
  if (exchange->tensor_from_object(object, found) != 0) {
    PyErr_Clear();
    return 0;
  }
  return found->data != NULL;
}

static uintptr_t address(const Tensor *tensor) { return (uintptr_t)tensor->data + tensor->byte_offset; }

static uint64_t bytes_of(const Tensor *tensor) {
  uint64_t count = 1;
  for (int32_t i = 0; i < tensor->ndim; ++i) count *= (uint64_t)tensor->shape[i];
  return (count * tensor->dtype.bits * tensor->dtype.lanes + 7) / 8;
}

/* 1: as a kernel takes it; 0: not; -1: an error. What holds of the whole process is `unwatched`'s. */
static int plain(PyObject *object, Tensor *found) {
  if (!looked_at(object, found) || address(found) % ALIGNED) return 0;
  int64_t step = 1;
  for (int32_t i = found->ndim - 1; i >= 0; --i) {
    if (found->shape[i] != 1 && found->strides != NULL && found->strides[i] != step) return 0;
    step *= found->shape[i];
  }
  int not_so = truth(PyObject_GetAttr(object, needs_gradient));
  if (not_so == 0) not_so = truth(PyObject_CallFunctionObjArgs(is_negated, object, NULL));
  return not_so < 0 ? -1 : !not_so;
}

/* 1: no mode of PyTorch watches calls, nothing is traced, and there are no tangents; 0: else; -1: an error. */
static int unwatched(void) {
  PyObject *modes = PyObject_CallFunctionObjArgs(count_modes, NULL);
  if (modes == NULL) return -1;
  long count = PyLong_AsLong(modes);
  Py_DECREF(modes);
  PyObject *graph = PyObject_CallFunctionObjArgs(tracing, NULL);
  if (graph == NULL) return -1;
  int traced = graph != Py_None;
  Py_DECREF(graph);
  if (traced) return 0;
  PyObject *depth = PyDict_GetItemWithError(forward_ad, level);
  if (depth == NULL) return PyErr_Occurred() ? -1 : 0;
  int so = count == 0 && PyLong_AsLong(depth) < 0;
  return PyErr_Occurred() ? -1 : so;
}

/* ---- keys ------------------------------------------------------------------------------------------------------- */

/* Writes what a kernel depends on of a tensor; the words written, or 0 where there is no room. */
static Py_ssize_t write_facts(const Tensor *tensor, int64_t *words, Py_ssize_t room) {
  if (room < HEADER + tensor->ndim) return 0;
  words[0] = tensor->ndim;
  words[1] = (int64_t)tensor->dtype.code << 32 | tensor->dtype.bits << 16 | tensor->dtype.lanes;
  words[2] = (int64_t)tensor->device.type << 32 | (uint32_t)tensor->device.id;
  memcpy(words + HEADER, tensor->shape, sizeof(int64_t) * (size_t)tensor->ndim);
  return HEADER + tensor->ndim;
}

/* What stands in front of the words of an argument that is no tensor; of a tensor it is the number of dimensions. */
enum { NONE = -1, NO = -2, YES = -3, INTEGER = -4, NUMBER = -5, TEXT = -6 };

/* Writes what kind of argument of a kernel this is, which is no tensor; 0 where it is of none, or there is no room. */
static Py_ssize_t write_kind(PyObject *value, int64_t *words, Py_ssize_t room) {
  int overflow = 0;
  if (room < 1) return 0;
  if (value == Py_None) {
    words[0] = NONE;
  } else if (PyLong_CheckExact(value)) {
    words[0] = INTEGER;
    PyLong_AsLongLongAndOverflow(value, &overflow);
  } else if (PyFloat_CheckExact(value)) {
    words[0] = NUMBER;
  } else {
    return 0;
  }
  return overflow ? 0 : 1;
}

/* Writes an argument that is no tensor; the words written, or 0 where it is of no known type or there is no room. */
static Py_ssize_t write_value(PyObject *value, int64_t *words, Py_ssize_t room) {
  if (room < 2) return 0;
  if (value == Py_None || PyBool_Check(value)) {
    words[0] = value == Py_None ? NONE : value == Py_True ? YES : NO;
    return 1;
  }
  if (PyLong_CheckExact(value)) {
    int overflow;
    words[0] = INTEGER;
    words[1] = PyLong_AsLongLongAndOverflow(value, &overflow);
    return overflow ? 0 : 2;
  }
  if (PyFloat_CheckExact(value)) {
    double number = PyFloat_AsDouble(value);
    words[0] = NUMBER;
    memcpy(words + 1, &number, sizeof number);
    return 2;
  }
  if (PyUnicode_CheckExact(value)) {
    Py_ssize_t size;
    const char *text = PyUnicode_AsUTF8AndSize(value, &size);
    if (text == NULL) PyErr_Clear();
    if (text == NULL || size > (room - 2) * (Py_ssize_t)sizeof *words) return 0;
    Py_ssize_t used = 2 + (size + (Py_ssize_t)sizeof *words - 1) / (Py_ssize_t)sizeof *words;
    words[0] = TEXT;
    words[used - 1] = 0; /* the bytes behind the text; where there is none, its size */
    words[1] = size;
    memcpy(words + 2, text, (size_t)size);
    return used;
  }
  return 0;
}

typedef Py_ssize_t (*Writer)(PyObject *value, int64_t *words, Py_ssize_t room);

/* The facts of a tuple's tensors, and of its other items what `written` tells; bytes, or NULL, with or without an error:
 * a tensor is not plain, or another item is of no known type. Extents of a tensor whose bit of `free` is set are left
 * out. */
static PyObject *facts_of(PyObject *given, Writer written, unsigned long free) {
  int64_t words[MOST_WORDS];
  Py_ssize_t used = 0;
  for (Py_ssize_t i = 0, n = PyTuple_Size(given); i < n; ++i) {
    PyObject *one = PyTuple_GetItem(given, i);
    Tensor tensor;
    Py_ssize_t more = 0, room = MOST_WORDS - used;
    if ((PyObject *)Py_TYPE(one) != tensor_type) {
      more = written(one, words + used, room);
    } else if (plain(one, &tensor) == 1) {
      more = write_facts(&tensor, words + used, room);
      if (more != 0 && i < FREE_BITS && free >> i & 1) more = HEADER;
    }
    if (more == 0) return NULL;
    used += more;
  }
  return PyBytes_FromStringAndSize((const char *)words, used * (Py_ssize_t)sizeof(int64_t));
}

static PyObject *key_for(PyObject *what, PyObject *given, Writer written, unsigned long free) { /* NULL with or without an error */
  if (exchange == NULL || unwatched() != 1) return NULL;
  PyObject *facts = facts_of(given, written, free);
  if (facts == NULL) return NULL;
  PyObject *key = PyTuple_Pack(2, what, facts);
  Py_DECREF(facts);
  return key;
}

/* What was kept for such arguments, a new reference, or NULL, with or without an error. */
static PyObject *found_for(PyObject *launchers, PyObject *what, PyObject *given, Writer written, unsigned long free) {
  PyObject *key = key_for(what, given, written, free);
  if (key == NULL) return NULL;
  PyObject *found = PyDict_GetItemWithError(launchers, key);
  Py_XINCREF(found);
  Py_DECREF(key);
  return found;
}

/* ---- outputs ---------------------------------------------------------------------------------------------------- */

static int overlap(const Tensor *one, const Tensor *other) {
  return address(one) < address(other) + bytes_of(other) && address(other) < address(one) + bytes_of(one);
}

/* Whether two tensors have the same facts; those of a prototype are those of the outputs that are made like it. */
static int alike(const Tensor *one, const Tensor *other) {
  int64_t first[MOST_WORDS], second[MOST_WORDS];
  Py_ssize_t used = write_facts(one, first, MOST_WORDS);
  return used != 0 && used == write_facts(other, second, MOST_WORDS) &&
         memcmp(first, second, (size_t)used * sizeof(int64_t)) == 0;
}

/* 1: each of `outputs` is like its prototype, and shares no memory with an argument or another output; 0: not; -1: an
 * error. */
static int fit(PyObject *outputs, PyObject *likes, PyObject *arguments) {
  Py_ssize_t count = PyTuple_Size(outputs);
  if (count != PyTuple_Size(likes)) return 0;
  for (Py_ssize_t i = 0; i < count; ++i) {
    Tensor out, other;
    int so = plain(PyTuple_GetItem(outputs, i), &out);
    if (so != 1) return so;
    if (!looked_at(PyTuple_GetItem(likes, i), &other) || !alike(&out, &other)) return 0;
    for (Py_ssize_t j = 0; j < i; ++j) {
      if (!looked_at(PyTuple_GetItem(outputs, j), &other) || overlap(&out, &other)) return 0;
    }
    for (Py_ssize_t j = 0, m = PyTuple_Size(arguments); j < m; ++j) {
      PyObject *argument = PyTuple_GetItem(arguments, j);
      if (argument == Py_None || PyLong_Check(argument) || PyFloat_Check(argument)) continue;
      if (!looked_at(argument, &other) || overlap(&out, &other)) return 0;
    }
  }
  return 1;
}

static PyObject *made(PyObject *likes) {
  Py_ssize_t n = PyTuple_Size(likes);
  PyObject *outputs = PyTuple_New(n);
  for (Py_ssize_t i = 0; outputs != NULL && i < n; ++i) {
    PyObject *one = PyObject_CallFunctionObjArgs(empty_like, PyTuple_GetItem(likes, i), NULL);
    if (one == NULL || PyTuple_SetItem(outputs, i, one) < 0) Py_CLEAR(outputs);
  }
  return outputs;
}

/* The arguments that are there, and the outputs. */
static PyObject *joined(PyObject *arguments, PyObject *outputs) {
  Py_ssize_t given = PyTuple_Size(arguments), made_ones = PyTuple_Size(outputs), present = 0, next = 0;
  for (Py_ssize_t i = 0; i < given; ++i) present += PyTuple_GetItem(arguments, i) != Py_None;
  PyObject *all = PyTuple_New(present + made_ones);
  for (Py_ssize_t i = 0; all != NULL && i < given + made_ones; ++i) {
    PyObject *one = i < given ? PyTuple_GetItem(arguments, i) : PyTuple_GetItem(outputs, i - given);
    if (i < given && one == Py_None) continue;
    if (PyTuple_SetItem(all, next++, Py_NewRef(one)) < 0) Py_CLEAR(all);
  }
  return all;
}

/* Calls a kernel by a recipe: its arguments, those of the operator's call in the places of None, and new outputs. */
static PyObject *by_recipe(PyObject *recipe, PyObject *given) {
  PyObject *likes = PyTuple_GetItem(recipe, 1), *before = PyTuple_GetItem(recipe, 3), *places = PyTuple_GetItem(recipe, 4);
  if (likes == NULL || before == NULL || places == NULL) return NULL;
  Py_ssize_t inputs = PyTuple_Size(before), all = inputs + PyTuple_Size(likes), next = 0;
  PyObject *arguments = PyTuple_New(all), *result = NULL;
  for (Py_ssize_t i = 0; arguments != NULL && i < all; ++i) {
    PyObject *one;
    if (i < inputs) {
      one = PyTuple_GetItem(before, i);
      if (one == Py_None) {
        PyObject *place = PyTuple_GetItem(places, next++);
        one = place == NULL ? NULL : PyTuple_GetItem(given, PyLong_AsSsize_t(place));
      }
      Py_XINCREF(one);
    } else {
      one = PyObject_CallFunctionObjArgs(empty_like, PyTuple_GetItem(likes, i - inputs), NULL);
    }
    if (one == NULL || PyTuple_SetItem(arguments, i, one) < 0) Py_CLEAR(arguments);
  }
  if (arguments == NULL) return NULL;
  PyObject *nothing = PyObject_Call(PyTuple_GetItem(recipe, 0), arguments, NULL);
  if (nothing != NULL) {
    Py_DECREF(nothing);
    int single = PyTuple_GetItem(recipe, 2) == Py_True;
    result = single ? Py_NewRef(PyTuple_GetItem(arguments, inputs)) : PyTuple_GetSlice(arguments, inputs, all);
  }
  Py_DECREF(arguments);
  return result;
}

/* ---- the module's functions ------------------------------------------------------------------------------------- */

static PyObject *none_unless_error(void) { return PyErr_Occurred() ? NULL : Py_NewRef(Py_None); }

static int count_is(Py_ssize_t given, Py_ssize_t wanted) {
  if (given != wanted) PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", wanted, given);
  return given == wanted;
}

static PyObject *prepare(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
  (void)self;
  if (!count_is(nargs, 7)) return NULL;
  static const char *const name = "dlpack_exchange_api";
  const Exchange *table = PyCapsule_IsValid(args[6], name) ? PyCapsule_GetPointer(args[6], name) : NULL;
  while (table != NULL && table->version.major != MAJOR) table = table->before;
  if (table == NULL || table->tensor_from_object == NULL) return Py_NewRef(Py_False);
  PyObject **kept[] = {&tensor_type, &is_negated, &empty_like, &count_modes, &tracing, &forward_ad};
  for (size_t i = 0; i < sizeof kept / sizeof *kept; ++i) *kept[i] = Py_NewRef(args[i]);
  exchange = table;
  return Py_NewRef(Py_True);
}

static PyObject *is_plain(PyObject *self, PyObject *tensor) {
  (void)self;
  Tensor found;
  int so = exchange == NULL ? 0 : unwatched();
  if (so == 1) so = plain(tensor, &found);
  return so < 0 ? NULL : PyBool_FromLong(so);
}

/* The mask that follows `wanted` arguments, or 0 where it is left out; -1: an error. */
static long free_behind(PyObject *const *args, Py_ssize_t nargs, Py_ssize_t wanted) {
  if (nargs == wanted + 1) return PyLong_AsLong(args[wanted]);
  return count_is(nargs, wanted) ? 0 : -1;
}

static PyObject *key(PyObject *const *args, Py_ssize_t nargs, Writer written) {
  long free = free_behind(args, nargs, 2);
  if (free < 0) return NULL;
  PyObject *found = key_for(args[0], args[1], written, (unsigned long)free);
  return found == NULL ? none_unless_error() : found;
}

static PyObject *key_of(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
  (void)self;
  return key(args, nargs, write_value);
}

static PyObject *kinds_of(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
  (void)self;
  return key(args, nargs, write_kind);
}

static PyObject *repeated(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
  (void)self;
  long free = free_behind(args, nargs, 3);
  if (free < 0) return NULL;
  PyObject *found = found_for(args[0], args[1], args[2], write_kind, (unsigned long)free);
  return found == NULL ? none_unless_error() : found;
}

static PyObject *again(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
  (void)self;
  long free = free_behind(args, nargs, 4);
  if (free < 0) return NULL;
  PyObject *arguments = args[2], *out = args[3];
  PyObject *found = found_for(args[0], args[1], arguments, write_kind, (unsigned long)free);
  if (found == NULL) return none_unless_error();
  PyObject *function, *likes, *outputs = NULL, *result = NULL;
  int single;
  if (!PyArg_ParseTuple(found, "OOp", &function, &likes, &single)) goto done;
  if (out == Py_None) {
    outputs = made(likes);
    if (outputs == NULL) goto done;
  } else {
    outputs = single ? PyTuple_Pack(1, out) : PyTuple_CheckExact(out) ? Py_NewRef(out) : NULL;
    if (outputs == NULL || fit(outputs, likes, arguments) != 1) {
      result = none_unless_error();
      goto done;
    }
  }
  PyObject *all = joined(arguments, outputs);
  if (all == NULL) goto done;
  PyObject *nothing = PyObject_Call(function, all, NULL);
  Py_DECREF(all);
  if (nothing == NULL) goto done;
  Py_DECREF(nothing);
  result = Py_NewRef(out != Py_None ? out : single ? PyTuple_GetItem(outputs, 0) : outputs);
done:
  Py_XDECREF(outputs);
  Py_DECREF(found);
  return result;
}

static PyObject *recalled(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
  (void)self;
  if (!count_is(nargs, 3)) return NULL;
  PyObject *known = PyDict_GetItemWithError(args[0], args[1]);
  if (known == NULL) return none_unless_error();
  Py_INCREF(known);
  PyObject *found = found_for(known, Py_None, args[2], write_value, 0);
  Py_DECREF(known);
  if (found == NULL) return none_unless_error();
  PyObject *result = by_recipe(found, args[2]);
  Py_DECREF(found);
  return result;
}

static PyMethodDef methods[] = {
    {"prepare", (PyCFunction)(void (*)(void))prepare, METH_FASTCALL, NULL},
    {"is_plain", is_plain, METH_O, NULL},
    {"recalled", (PyCFunction)(void (*)(void))recalled, METH_FASTCALL, NULL},
    {"key_of", (PyCFunction)(void (*)(void))key_of, METH_FASTCALL, NULL},
    {"kinds_of", (PyCFunction)(void (*)(void))kinds_of, METH_FASTCALL, NULL},
    {"repeated", (PyCFunction)(void (*)(void))repeated, METH_FASTCALL, NULL},
    {"again", (PyCFunction)(void (*)(void))again, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "native", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_native(void) {
  needs_gradient = PyUnicode_InternFromString("requires_grad");
  level = PyUnicode_InternFromString("_current_level");
  if (needs_gradient == NULL || level == NULL) return NULL;
  PyObject *made_module = PyModule_Create(&module);
  if (made_module != NULL && PyModule_AddIntConstant(made_module, "revision", REVISION) < 0) Py_CLEAR(made_module);
  return made_module;
}
