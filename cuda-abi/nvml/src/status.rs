//! Result codes (`nvmlReturn_t`) and their texts.

use sluice_cuda_frontend::ErrorCode;
use std::ffi::CStr;

/// An `nvmlReturn_t` other than success.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Status(pub u32);

/// The result of every call.
pub type Result<T = ()> = core::result::Result<T, Status>;

impl ErrorCode for Status {
    const NULL_POINTER: Status = Status::INVALID_ARGUMENT;
    const NO_ROOM: Status = Status::INSUFFICIENT_SIZE;
    const PANIC: Status = Status::UNKNOWN;

    fn code(self) -> u32 {
        self.0
    }
}

macro_rules! statuses {
    ($($name:ident = $code:literal $text:literal,)+) => {
        impl Status {
            $(#[doc = concat!("`NVML_ERROR_", stringify!($name), "`.")] pub const $name: Status = Status($code);)+

            /// The text of a result code, for `nvmlErrorString`.
            #[must_use]
            pub const fn text(code: u32) -> &'static CStr {
                match code {
                    0 => c"Success",
                    $($code => $text,)+
                    _ => c"Unknown Error",
                }
            }
        }
    };
}
statuses! {
    UNINITIALIZED = 1 c"Uninitialized",
    INVALID_ARGUMENT = 2 c"Invalid Argument",
    NOT_SUPPORTED = 3 c"Not Supported",
    NO_PERMISSION = 4 c"Insufficient Permissions",
    ALREADY_INITIALIZED = 5 c"Already Initialized",
    NOT_FOUND = 6 c"Not Found",
    INSUFFICIENT_SIZE = 7 c"Insufficient Size",
    INSUFFICIENT_POWER = 8 c"Insufficient External Power",
    DRIVER_NOT_LOADED = 9 c"Driver Not Loaded",
    TIMEOUT = 10 c"Timeout",
    IRQ_ISSUE = 11 c"Interrupt Request Issue",
    LIBRARY_NOT_FOUND = 12 c"NVML Shared Library Not Found",
    FUNCTION_NOT_FOUND = 13 c"Function Not Found",
    CORRUPTED_INFOROM = 14 c"Corrupted infoROM",
    GPU_IS_LOST = 15 c"GPU is lost",
    RESET_REQUIRED = 16 c"GPU requires restart",
    OPERATING_SYSTEM = 17 c"The operating system has blocked the request",
    LIB_RM_VERSION_MISMATCH = 18 c"RM has detected an NVML/RM version mismatch",
    IN_USE = 19 c"In use by another client",
    MEMORY = 20 c"Insufficient Memory",
    NO_DATA = 21 c"No data",
    VGPU_ECC_NOT_SUPPORTED = 22 c"The requested vGPU operation is not available on target device, because ECC is enabled",
    INSUFFICIENT_RESOURCES = 23 c"Insufficient Resources",
    FREQ_NOT_SUPPORTED = 24 c"Frequency not supported",
    ARGUMENT_VERSION_MISMATCH = 25 c"Argument version mismatch",
    DEPRECATED = 26 c"Deprecated",
    NOT_READY = 27 c"Not Ready",
    GPU_NOT_FOUND = 28 c"No GPUs found",
    INVALID_STATE = 29 c"Invalid state",
    RESET_TYPE_NOT_SUPPORTED = 30 c"Reset type not supported",
    UNKNOWN = 999 c"Unknown Error",
}
