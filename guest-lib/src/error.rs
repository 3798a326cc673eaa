//! Result codes of the C API, as the shim returns them.

/// A `CUresult` other than success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Error(pub(crate) u32);

/// The result of every function of the API.
pub(crate) type Result<T = ()> = core::result::Result<T, Error>;

macro_rules! codes {
    ($($name:ident = $code:literal)+) => {
        impl Error {
            $(pub(crate) const $name: Error = Error($code);)+
        }
    };
}
codes! {
    INVALID_VALUE = 1
    OUT_OF_MEMORY = 2
    NOT_INITIALIZED = 3
    DEINITIALIZED = 4
    DEVICE_UNAVAILABLE = 46
    NO_DEVICE = 100
    INVALID_DEVICE = 101
    INVALID_CONTEXT = 201
    FILE_NOT_FOUND = 301
    OPERATING_SYSTEM = 304
    INVALID_HANDLE = 400
    NOT_FOUND = 500
    NOT_READY = 600
    LAUNCH_OUT_OF_RESOURCES = 701
    CONTEXT_IS_DESTROYED = 709
    NOT_SUPPORTED = 801
    SYSTEM_DRIVER_MISMATCH = 803
    UNKNOWN = 999
}
