//! The boundary to C: the results of entry points.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// An error of a C interface: a result code other than success, which is 0.
pub trait ErrorCode: Copy {
    /// For a null pointer where the interface requires memory.
    const NULL_POINTER: Self;
    /// For a buffer that is too small.
    const NO_ROOM: Self;
    /// For a bug of the library.
    const PANIC: Self;

    /// Returns the number that the program gets.
    fn code(self) -> u32;
}

/// Refuses a null handle as a value. NVIDIA's driver does so in some calls, before it looks for the object.
///
/// # Errors
/// [`ErrorCode::NULL_POINTER`].
pub const fn given<E: ErrorCode>(handle: u64) -> Result<u64, E> {
    if handle == 0 { Err(E::NULL_POINTER) } else { Ok(handle) }
}

/// Runs the body of an entry point and returns its result code. No panic unwinds into the program: after one, `panicked` may log
/// it, and the call fails.
pub fn enter<E: ErrorCode>(body: impl FnOnce() -> Result<(), E>, panicked: impl FnOnce()) -> u32 {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => 0,
        Ok(Err(error)) => error.code(),
        Err(_) => {
            panicked();
            E::PANIC.code()
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub(crate) enum Error {
        Null = 1,
        NoRoom = 2,
        Panic = 3,
    }

    impl ErrorCode for Error {
        const NULL_POINTER: Error = Error::Null;
        const NO_ROOM: Error = Error::NoRoom;
        const PANIC: Error = Error::Panic;

        fn code(self) -> u32 {
            self as u32
        }
    }

    #[test]
    fn panic_in_an_entry_point_is_reported_and_becomes_its_code() {
        let mut reports = 0;
        assert_eq!(enter(|| Ok::<(), Error>(()), || reports += 1), 0);
        assert_eq!(enter(|| Err(Error::NoRoom), || reports += 1), 2);
        assert_eq!(reports, 0);
        assert_eq!(enter::<Error>(|| panic!("a bug"), || reports += 1), 3);
        assert_eq!(reports, 1);
    }
}
