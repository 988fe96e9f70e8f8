#include "deep_ep/error.hpp"
#include "python/bind.hpp"

namespace deep_ep::python {
namespace {

PyObject* contract_error = nullptr;  // of the module, which is never unloaded

PyObject* exception_of(ErrorCode code) noexcept {
  switch (code) {
    case ErrorCode::kInvalidArgument:
      return contract_error;
    case ErrorCode::kUnsupported:
      return PyExc_NotImplementedError;
    case ErrorCode::kSystem:
      return PyExc_OSError;
    case ErrorCode::kTimeout:
      return PyExc_TimeoutError;
    case ErrorCode::kPeer:
    case ErrorCode::kDevice:
    case ErrorCode::kInternal:
      return PyExc_RuntimeError;
  }
  return PyExc_RuntimeError;
}

void translate(const std::exception_ptr& exception, void* /*payload*/) {
  try {
    std::rethrow_exception(exception);
  } catch (const Error& error) {
    PyErr_SetString(exception_of(error.code()), error.what());
  }
}

}  // namespace

void bind_errors(nb::module_& module) {
  // Programs written for the original catch AssertionError, all others ValueError.
  const nb::object bases =
      nb::make_tuple(nb::handle(PyExc_ValueError), nb::handle(PyExc_AssertionError));
  contract_error = PyErr_NewExceptionWithDoc(
      "deep_ep.ContractError", "A call broke a rule of its documentation; fix the call.",
      bases.ptr(), nullptr);
  if (contract_error == nullptr) throw nb::python_error();
  module.attr("ContractError") = nb::borrow(contract_error);
  nb::register_exception_translator(translate);
}

}  // namespace deep_ep::python
