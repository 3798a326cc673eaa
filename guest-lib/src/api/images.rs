//! Arrays, textures, surfaces and references. All are forwarded to the implementation that the software GPU has, too.

use crate::{
    arguments::{Call, In, Out},
    error::Result,
    graphs::GRAPHS,
    images::IMAGES,
    process,
};
use core::ffi::{c_char, c_void};

/// Defines functions that need `cuInit`.
macro_rules! calls {
    ($(fn $name:ident($($argument:ident: $type:ty),* $(,)?) $body:block)*) => {$(
        pub(crate) fn $name(_: Call, $($argument: $type),*) -> Result {
            process::get()?;
            $body
        }
    )*};
}
sluice_cuda_images::array_functions!(calls, IMAGES, GRAPHS);
sluice_cuda_images::object_functions!(calls, IMAGES);
sluice_cuda_images::reference_functions!(calls, IMAGES);
