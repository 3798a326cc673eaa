//! Result codes of the C API, as the shim returns them.

use sluice_cuda_abi::sys::CUresult;
use sluice_cuda_frontend::ErrorCode;

/// A `CUresult` other than success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Error(pub(crate) u32);

/// The result of every function of the API.
pub(crate) type Result<T = ()> = core::result::Result<T, Error>;

macro_rules! codes {
    ($($name:ident = $code:ident)+) => {
        impl Error {
            $(pub(crate) const $name: Error = Error(CUresult::$code as u32);)+
        }
    };
}
codes! {
    INVALID_VALUE = CUDA_ERROR_INVALID_VALUE
    OUT_OF_MEMORY = CUDA_ERROR_OUT_OF_MEMORY
    NOT_INITIALIZED = CUDA_ERROR_NOT_INITIALIZED
    DEINITIALIZED = CUDA_ERROR_DEINITIALIZED
    DEVICE_UNAVAILABLE = CUDA_ERROR_DEVICE_UNAVAILABLE
    NO_DEVICE = CUDA_ERROR_NO_DEVICE
    INVALID_DEVICE = CUDA_ERROR_INVALID_DEVICE
    INVALID_CONTEXT = CUDA_ERROR_INVALID_CONTEXT
    NO_BINARY_FOR_GPU = CUDA_ERROR_NO_BINARY_FOR_GPU
    FILE_NOT_FOUND = CUDA_ERROR_FILE_NOT_FOUND
    OPERATING_SYSTEM = CUDA_ERROR_OPERATING_SYSTEM
    INVALID_HANDLE = CUDA_ERROR_INVALID_HANDLE
    NOT_FOUND = CUDA_ERROR_NOT_FOUND
    NOT_READY = CUDA_ERROR_NOT_READY
    LAUNCH_OUT_OF_RESOURCES = CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES
    PEER_ACCESS_UNSUPPORTED = CUDA_ERROR_PEER_ACCESS_UNSUPPORTED
    PEER_ACCESS_NOT_ENABLED = CUDA_ERROR_PEER_ACCESS_NOT_ENABLED
    CONTEXT_IS_DESTROYED = CUDA_ERROR_CONTEXT_IS_DESTROYED
    UNSUPPORTED_EXEC_AFFINITY = CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY
    HOST_MEMORY_ALREADY_REGISTERED = CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
    HOST_MEMORY_NOT_REGISTERED = CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED
    NOT_PERMITTED = CUDA_ERROR_NOT_PERMITTED
    NOT_SUPPORTED = CUDA_ERROR_NOT_SUPPORTED
    SYSTEM_DRIVER_MISMATCH = CUDA_ERROR_SYSTEM_DRIVER_MISMATCH
    UNKNOWN = CUDA_ERROR_UNKNOWN
}

impl From<u32> for Error {
    fn from(code: u32) -> Error {
        Error(code)
    }
}

impl ErrorCode for Error {
    const NULL_POINTER: Error = Error::INVALID_VALUE;
    const NO_ROOM: Error = Error::INVALID_VALUE;
    const PANIC: Error = Error::UNKNOWN;

    fn code(self) -> u32 {
        self.0
    }
}
