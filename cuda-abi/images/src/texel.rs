//! The formats of elements.

use sluice_cuda_abi::sys::CUresult as Code;

/// The format of one component of an element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Component {
    /// 8 bits without a sign.
    U8,
    /// 16 bits without a sign.
    U16,
    /// 32 bits without a sign.
    U32,
    /// 8 bits with a sign.
    S8,
    /// 16 bits with a sign.
    S16,
    /// 32 bits with a sign.
    S32,
    /// A float of 16 bits.
    F16,
    /// A float of 32 bits.
    F32,
    /// 8 bits that a texture always reads as 0 to 1.
    Unorm8,
    /// 16 bits that a texture always reads as 0 to 1.
    Unorm16,
    /// 8 bits that a texture always reads as -1 to 1.
    Snorm8,
    /// 16 bits that a texture always reads as -1 to 1.
    Snorm16,
}

impl Component {
    /// Bytes.
    #[must_use]
    pub const fn bytes(self) -> u32 {
        match self {
            Component::U8 | Component::S8 | Component::Unorm8 | Component::Snorm8 => 1,
            Component::U16 | Component::S16 | Component::F16 | Component::Unorm16 | Component::Snorm16 => 2,
            Component::U32 | Component::S32 | Component::F32 => 4,
        }
    }

    /// True if a texture reads it as an integer when the program asks for that.
    #[must_use]
    pub const fn is_integer(self) -> bool {
        matches!(
            self,
            Component::U8 | Component::U16 | Component::U32 | Component::S8 | Component::S16 | Component::S32
        )
    }
}

/// An element: components of one format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Texel {
    /// The format of each component.
    pub component: Component,
    /// 1, 2 or 4 components.
    pub channels: u32,
}

/// The first format that names its number of components, and the last: each family has them with 1, 2 and 4.
const FAMILIES: [(u32, Component); 4] = [
    (0xc0, Component::Unorm8),
    (0xc3, Component::Unorm16),
    (0xc6, Component::Snorm8),
    (0xc9, Component::Snorm16),
];

impl Texel {
    /// Reads `CUarray_format` and a number of components.
    ///
    /// # Errors
    /// `CUDA_ERROR_NOT_SUPPORTED` for formats of blocks; `CUDA_ERROR_INVALID_VALUE` for those of video, as NVIDIA's driver returns it for
    /// planes, and for formats that do not exist.
    pub fn read(format: u32, channels: u32) -> Result<Texel, Code> {
        for (first, component) in FAMILIES {
            if let Some(place) = format.checked_sub(first).filter(|place| *place < 3) {
                let texel = Texel { component, channels: 1 << place };
                return if channels == texel.channels {
                    Ok(texel)
                } else {
                    Err(Code::CUDA_ERROR_INVALID_VALUE)
                };
            }
        }
        let component = match format {
            0x01 => Component::U8,
            0x02 => Component::U16,
            0x03 => Component::U32,
            0x08 => Component::S8,
            0x09 => Component::S16,
            0x0a => Component::S32,
            0x10 => Component::F16,
            0x20 => Component::F32,
            // Packed components, and blocks.
            0x50 | 0x91..=0x9e => return Err(Code::CUDA_ERROR_NOT_SUPPORTED),
            // Also the planes and the packed components of video.
            _ => return Err(Code::CUDA_ERROR_INVALID_VALUE),
        };
        match channels {
            1 | 2 | 4 => Ok(Texel { component, channels }),
            _ => Err(Code::CUDA_ERROR_INVALID_VALUE),
        }
    }

    /// The `CUarray_format`.
    #[must_use]
    pub const fn format(self) -> u32 {
        // 1, 2 and 4 components are formats next to each other.
        let place = self.channels >> 1;
        match self.component {
            Component::U8 => 0x01,
            Component::U16 => 0x02,
            Component::U32 => 0x03,
            Component::S8 => 0x08,
            Component::S16 => 0x09,
            Component::S32 => 0x0a,
            Component::F16 => 0x10,
            Component::F32 => 0x20,
            Component::Unorm8 => 0xc0 + place,
            Component::Unorm16 => 0xc3 + place,
            Component::Snorm8 => 0xc6 + place,
            Component::Snorm16 => 0xc9 + place,
        }
    }

    /// Reads `CUresourceViewFormat`; `None` for the format of the array.
    ///
    /// # Errors
    /// `CUDA_ERROR_NOT_SUPPORTED` for blocks, `CUDA_ERROR_INVALID_VALUE` for others that do not exist.
    pub fn read_view(format: u32) -> Result<Option<Texel>, Code> {
        const ORDER: [Component; 8] = [
            Component::U8,
            Component::S8,
            Component::U16,
            Component::S16,
            Component::U32,
            Component::S32,
            Component::F16,
            Component::F32,
        ];
        match format {
            0 => Ok(None),
            1..=24 => {
                let place = format - 1;
                let component = ORDER.into_iter().nth((place / 3) as usize);
                Ok(component.map(|component| Texel { component, channels: 1 << (place % 3) }))
            }
            0x19..=0x22 => Err(Code::CUDA_ERROR_NOT_SUPPORTED),
            _ => Err(Code::CUDA_ERROR_INVALID_VALUE),
        }
    }

    /// Bytes of an element: at most 16.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        (self.component.bytes() * self.channels) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_format_is_written_as_it_was_read() {
        let mut formats = 0;
        for format in 0..=0x200 {
            for channels in 0..=5 {
                if let Ok(texel) = Texel::read(format, channels) {
                    assert_eq!((texel.format(), texel.channels), (format, channels));
                    assert!((1..=16).contains(&texel.bytes()));
                    formats += 1;
                }
            }
        }
        assert_eq!(formats, 8 * 3 + 4 * 3);
        assert_eq!(Texel::read(0xc2, 4), Ok(Texel { component: Component::Unorm8, channels: 4 }));
        assert_eq!(Texel::read(0xc2, 1), Err(Code::CUDA_ERROR_INVALID_VALUE));
        assert_eq!(Texel::read(0x91, 4), Err(Code::CUDA_ERROR_NOT_SUPPORTED), "blocks");
        assert_eq!(Texel::read(0xb0, 3), Err(Code::CUDA_ERROR_INVALID_VALUE), "planes");
        assert_eq!(Texel::read(0x20, 3), Err(Code::CUDA_ERROR_INVALID_VALUE));
    }

    #[test]
    fn formats_of_views_follow_the_order_of_the_header() {
        assert_eq!(Texel::read_view(0), Ok(None));
        let float = Texel { component: Component::F32, channels: 4 };
        assert_eq!(Texel::read_view(0x18), Ok(Some(float)));
        assert_eq!(Texel::read_view(0x0b), Ok(Some(Texel { component: Component::S16, channels: 2 })));
        assert_eq!(Texel::read_view(0x19), Err(Code::CUDA_ERROR_NOT_SUPPORTED));
        assert_eq!(Texel::read_view(0x23), Err(Code::CUDA_ERROR_INVALID_VALUE));
    }
}
