//! The options of the driver's compiler and linker (`CUjit_option`).

/// The meaning of an option's value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JitValue {
    /// A number of 32 bits, or ignored.
    Number,
    /// A number that the driver overwrites: the threads of a block for which it has compiled.
    Threads,
    /// Overwritten with the milliseconds of the compilation, an `f32`.
    WallTime,
    /// The buffer of the information log.
    InfoLog,
    /// Bytes of that buffer, overwritten with the bytes used.
    InfoLogBytes,
    /// The buffer of the error log.
    ErrorLog,
    /// Bytes of that buffer, overwritten with the bytes used.
    ErrorLogBytes,
    /// The greatest number of host threads for a compilation. Fewer are permitted.
    HostThreads,
    /// A list of names or addresses of the program, or the length of one.
    Addresses,
}

/// `CU_JIT_MAX_REGISTERS`.
pub const MAX_REGISTERS: u32 = 0;
/// `CU_JIT_THREADS_PER_BLOCK`.
pub const THREADS_PER_BLOCK: u32 = 1;
/// `CU_JIT_WALL_TIME`.
pub const WALL_TIME: u32 = 2;
/// `CU_JIT_INFO_LOG_BUFFER`.
pub const INFO_LOG: u32 = 3;
/// `CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES`.
pub const INFO_LOG_BYTES: u32 = 4;
/// `CU_JIT_ERROR_LOG_BUFFER`.
pub const ERROR_LOG: u32 = 5;
/// `CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES`.
pub const ERROR_LOG_BYTES: u32 = 6;
/// `CU_JIT_OPTIMIZATION_LEVEL`.
pub const OPTIMIZATION_LEVEL: u32 = 7;
/// `CU_JIT_TARGET_FROM_CUCONTEXT`.
pub const TARGET_FROM_CONTEXT: u32 = 8;
/// `CU_JIT_TARGET`.
pub const TARGET: u32 = 9;
/// `CU_JIT_FALLBACK_STRATEGY`, which no link accepts.
pub const FALLBACK_STRATEGY: u32 = 10;
/// `CU_JIT_LOG_VERBOSE`.
pub const LOG_VERBOSE: u32 = 12;
/// `CU_JIT_CACHE_MODE`.
pub const CACHE_MODE: u32 = 14;

/// Returns the meaning of an option's value; `None` for an option that the newest header does not have.
#[must_use]
pub const fn value_of(option: u32) -> Option<JitValue> {
    Some(match option {
        THREADS_PER_BLOCK => JitValue::Threads,
        WALL_TIME => JitValue::WallTime,
        INFO_LOG => JitValue::InfoLog,
        INFO_LOG_BYTES => JitValue::InfoLogBytes,
        ERROR_LOG => JitValue::ErrorLog,
        ERROR_LOG_BYTES => JitValue::ErrorLogBytes,
        // Global symbols, referenced kernels, referenced variables.
        17..=19 | 25..=28 => JitValue::Addresses,
        34 | 35 => JitValue::HostThreads,
        0..=33 => JitValue::Number,
        _ => return None,
    })
}

/// True if a guest may send the option with a number, which the worker then passes to the driver. The places of results are the worker's
/// own, and the number of its threads is not the guest's to choose.
#[must_use]
pub const fn is_carried(option: u32) -> bool {
    matches!(value_of(option), Some(JitValue::Number | JitValue::Threads | JitValue::WallTime))
}

/// True if `cuLinkAddData` and `cuLinkAddFile` accept the option, which then holds for one input.
#[must_use]
pub const fn is_for_input(option: u32) -> bool {
    !matches!(option, WALL_TIME..=ERROR_LOG_BYTES | TARGET_FROM_CONTEXT | TARGET)
}

/// The kinds of inputs of a link (`CUjitInputType`).
pub mod input {
    /// `CU_JIT_INPUT_CUBIN`.
    pub const CUBIN: u32 = 0;
    /// `CU_JIT_INPUT_PTX`.
    pub const PTX: u32 = 1;
    /// `CU_JIT_INPUT_FATBINARY`.
    pub const FATBINARY: u32 = 2;
    /// `CU_JIT_INPUT_OBJECT`.
    pub const OBJECT: u32 = 3;
    /// `CU_JIT_INPUT_LIBRARY`.
    pub const LIBRARY: u32 = 4;
    /// `CU_JIT_INPUT_NVVM`, the last.
    pub const NVVM: u32 = 5;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::CUjit_option;

    #[test]
    fn every_option_of_the_header_has_a_meaning_and_no_other() {
        let count = CUjit_option::CU_JIT_NUM_OPTIONS as u32;
        assert!((0..count.min(36)).all(|option| value_of(option).is_some()));
        assert_eq!(value_of(count.max(36)), None);
        assert_eq!(CUjit_option::CU_JIT_TARGET as u32, TARGET);
        assert_eq!(CUjit_option::CU_JIT_CACHE_MODE as u32, CACHE_MODE);
        assert_eq!(value_of(CUjit_option::CU_JIT_GLOBAL_SYMBOL_COUNT as u32), Some(JitValue::Addresses));
    }

    #[test]
    fn options_with_addresses_are_never_carried() {
        let carried: Vec<u32> = (0..64).filter(|option| is_carried(*option)).collect();
        assert_eq!(
            carried,
            [&[0, 1, 2][..], &(7..=16).collect::<Vec<_>>(), &[20, 21, 22, 23, 24], &[29, 30, 31, 32, 33]]
                .concat()
        );
    }
}
