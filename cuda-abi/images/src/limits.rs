//! The greatest extents, which are attributes of a device.

macro_rules! limits {
    ($($(#[$doc:meta])* $name:ident = $attribute:literal: $value:literal,)*) => {
        /// The extents that a device serves.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct Limits {
            $($(#[$doc])* pub $name: u32,)*
        }

        impl Limits {
            /// Those of the data-centre GPUs from the A100 to the H200.
            pub const DATA_CENTRE: Limits = Limits { $($name: $value,)* };

            /// Reads all from a device's attributes.
            ///
            /// # Errors
            /// The first error of `read`. A negative value counts as 0.
            pub fn read<E>(mut read: impl FnMut(i32) -> Result<i32, E>) -> Result<Limits, E> {
                Ok(Limits { $($name: u32::try_from(read($attribute)?).unwrap_or(0),)* })
            }

            /// Returns the value of a device attribute, if it is one of these.
            #[must_use]
            pub const fn attribute(&self, number: i32) -> Option<u32> {
                match number {
                    $($attribute => Some(self.$name),)*
                    _ => None,
                }
            }
        }
    };
}

limits! {
    /// Alignment of linear memory of a texture, in bytes.
    texture_alignment = 14: 512,
    /// Alignment of surfaces, in bytes.
    surface_alignment = 30: 512,
    /// Alignment of the rows of pitched memory, in bytes.
    texture_pitch_alignment = 51: 32,
    /// Width of a texture of one dimension.
    texture_1d_width = 21: 131_072,
    /// Width of a texture of two dimensions.
    texture_2d_width = 22: 131_072,
    /// Its height.
    texture_2d_height = 23: 65_536,
    /// Width of a texture of three dimensions.
    texture_3d_width = 24: 16_384,
    /// Its height.
    texture_3d_height = 25: 16_384,
    /// Its depth.
    texture_3d_depth = 26: 16_384,
    /// Width of layers of two dimensions.
    texture_2d_layered_width = 27: 32_768,
    /// Their height.
    texture_2d_layered_height = 28: 32_768,
    /// Their number.
    texture_2d_layered_layers = 29: 2_048,
    /// Width of layers of one dimension.
    texture_1d_layered_width = 42: 32_768,
    /// Their number.
    texture_1d_layered_layers = 43: 2_048,
    /// 1 if textures of two dimensions can be gathered.
    can_gather = 44: 1,
    /// Width of a texture for gathers.
    texture_gather_width = 45: 32_768,
    /// Its height.
    texture_gather_height = 46: 32_768,
    /// Other width of a texture of three dimensions.
    texture_3d_width_alternate = 47: 8_192,
    /// Its height.
    texture_3d_height_alternate = 48: 8_192,
    /// Its depth.
    texture_3d_depth_alternate = 49: 32_768,
    /// Width and height of a cube's face.
    texture_cubemap_width = 52: 32_768,
    /// Width and height of a face in layers of cubes.
    texture_cubemap_layered_width = 53: 32_768,
    /// Number of such faces.
    texture_cubemap_layered_layers = 54: 2_046,
    /// Width of a surface of one dimension.
    surface_1d_width = 55: 32_768,
    /// Width of a surface of two dimensions.
    surface_2d_width = 56: 131_072,
    /// Its height.
    surface_2d_height = 57: 65_536,
    /// Width of a surface of three dimensions.
    surface_3d_width = 58: 16_384,
    /// Its height.
    surface_3d_height = 59: 16_384,
    /// Its depth.
    surface_3d_depth = 60: 16_384,
    /// Width of a surface's layers of one dimension.
    surface_1d_layered_width = 61: 32_768,
    /// Their number.
    surface_1d_layered_layers = 62: 2_048,
    /// Width of a surface's layers of two dimensions.
    surface_2d_layered_width = 63: 32_768,
    /// Their height.
    surface_2d_layered_height = 64: 32_768,
    /// Their number.
    surface_2d_layered_layers = 65: 2_048,
    /// Width and height of a cube's face in a surface.
    surface_cubemap_width = 66: 32_768,
    /// Width and height of a face in a surface's layers of cubes.
    surface_cubemap_layered_width = 67: 32_768,
    /// Number of such faces.
    surface_cubemap_layered_layers = 68: 2_046,
    /// Elements of a texture over linear memory.
    texture_1d_linear_width = 69: 268_435_456,
    /// Elements of a row of pitched memory.
    texture_2d_linear_width = 70: 131_072,
    /// Its rows.
    texture_2d_linear_height = 71: 65_000,
    /// Bytes between its rows.
    texture_2d_linear_pitch = 72: 2_097_120,
    /// Width of a mipmapped array of two dimensions.
    texture_2d_mipmapped_width = 73: 32_768,
    /// Its height.
    texture_2d_mipmapped_height = 74: 32_768,
    /// Width of a mipmapped array of one dimension.
    texture_1d_mipmapped_width = 77: 32_768,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_read_from_attributes_are_those_attributes() {
        let limits = Limits::DATA_CENTRE;
        let read = Limits::read(|number| {
            limits.attribute(number).and_then(|value| i32::try_from(value).ok()).ok_or(number)
        });
        assert_eq!(read, Ok(limits));
        let sizes = (21..=29).chain(42..=49).chain(52..=74).chain([77]);
        assert!(sizes.clone().all(|number| limits.attribute(number).is_some_and(|value| value > 0)));
        assert_eq!(limits.attribute(75), None);
        assert_eq!(Limits::read(|_| Ok::<_, ()>(-1)).unwrap().texture_1d_width, 0);
    }
}
