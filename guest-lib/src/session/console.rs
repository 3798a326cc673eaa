//! The text that kernels print, written to the program's own output.

#![expect(unsafe_code, reason = "writes to C's standard streams")]

/// Appends text to C's standard output or standard error, in order with the program's own output.
pub(crate) fn print(error: bool, text: &[u8]) {
    unsafe extern "C" {
        static stdout: *mut libc::FILE;
        static stderr: *mut libc::FILE;
    }
    // SAFETY: the C library's streams exist from its start to its end.
    let stream = unsafe { if error { stderr } else { stdout } };
    // SAFETY: pointer and length describe the text. As with a driver, an error of the stream is left to the program.
    let _ = unsafe { libc::fwrite(text.as_ptr().cast(), 1, text.len(), stream) };
}
