//! The conversion between the bytes of a texel and the words of registers.

#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "channels are bits, and fractions round"
)]

use crate::exec::{mem, num};
use crate::image::{ChannelType, Format, Image, Level, Texture};

/// True if fetches of the texture return floats.
pub(super) fn is_float(texture: &Texture) -> bool {
    let channel = texture.image.format().channel;
    match channel {
        ChannelType::U32 | ChannelType::S32 => false,
        ChannelType::U8 | ChannelType::U16 | ChannelType::S8 | ChannelType::S16 => texture.sampler.promote,
        _ => true,
    }
}

/// The bits of a texel, one word for each channel; `None` outside the level.
#[inline]
fn raw(image: &Image, level: &Level, x: u32, y: u32, slice: u32) -> Option<[u32; 4]> {
    let address = image.texel(level, x, y, slice)?;
    let Format { channel, channels } = image.format();
    let size = channel.bytes();
    let mut out = [0; 4];
    for (n, to) in (0u64..).zip(&mut out[..usize::from(channels)]) {
        // Inside the texel, which is aligned to its size.
        *to = mem::read(mem::host(address + n * u64::from(size)), size, false) as u32;
    }
    Some(out)
}

fn sign(bits: u32, size: u32) -> i32 {
    num::sext(u64::from(bits), size * 8) as i32
}

fn fraction(bits: u32, channel: ChannelType) -> f32 {
    match channel {
        ChannelType::U8 | ChannelType::Unorm8 => bits as f32 / 255.0,
        ChannelType::U16 | ChannelType::Unorm16 => bits as f32 / 65535.0,
        ChannelType::S8 | ChannelType::Snorm8 => (sign(bits, 1) as f32 / 127.0).max(-1.0),
        ChannelType::S16 | ChannelType::Snorm16 => (sign(bits, 2) as f32 / 32767.0).max(-1.0),
        ChannelType::F16 => num::from_f16(bits),
        ChannelType::F32 | ChannelType::U32 | ChannelType::S32 => f32::from_bits(bits),
    }
}

/// Decodes a fraction from sRGB.
fn linear(x: f32) -> f32 {
    if x <= 0.04045 { x / 12.92 } else { ((x + 0.055) / 1.055).powf(2.4) }
}

/// The channels of a texel that is not a float, and the value of those that the format lacks.
pub(super) fn integers(texture: &Texture, level: &Level, x: u32, y: u32, slice: u32) -> Option<[u32; 4]> {
    let format = texture.image.format();
    let bits = raw(&texture.image, level, x, y, slice)?;
    Some(missing(format, bits.map(|v| extended(format.channel, v)), 1))
}

fn extended(channel: ChannelType, bits: u32) -> u32 {
    match channel {
        ChannelType::S8 => sign(bits, 1).cast_unsigned(),
        ChannelType::S16 => sign(bits, 2).cast_unsigned(),
        _ => bits,
    }
}

/// The channels of a texel as floats, and the value of those that the format lacks.
pub(super) fn floats(texture: &Texture, level: &Level, x: u32, y: u32, slice: u32) -> Option<[f32; 4]> {
    let format = texture.image.format();
    let words = raw(&texture.image, level, x, y, slice)?;
    if format.channel == ChannelType::F32 {
        return Some(missing(format, words.map(f32::from_bits), 1.0));
    }
    let mut out = words.map(|v| fraction(v, format.channel));
    if texture.sampler.srgb && matches!(format.channel, ChannelType::U8 | ChannelType::Unorm8) {
        out[..3].iter_mut().for_each(|v| *v = linear(*v));
    }
    Some(missing(format, out, 1.0))
}

/// Fills the channels that a format lacks: zero, and one in the last.
pub(super) fn missing<T: Default + Copy>(format: Format, mut texel: [T; 4], one: T) -> [T; 4] {
    let rest = &mut texel[usize::from(format.channels)..];
    rest.fill(T::default());
    if let Some(last) = rest.last_mut() {
        *last = one;
    }
    texel
}

/// Converts a word to a channel of a surface, for a formatted store. Values beyond the format saturate.
pub(super) fn encode(channel: ChannelType, word: u32) -> u32 {
    let float = f32::from_bits(word);
    let scaled = |low: f32, most: f32| {
        let x = if float.is_nan() { 0.0 } else { float.clamp(low, 1.0) };
        (x * most).round_ties_even() as i32 as u32
    };
    let signed = word.cast_signed();
    match channel {
        ChannelType::U8 => word.min(0xff),
        ChannelType::U16 => word.min(0xffff),
        ChannelType::S8 => signed.clamp(-128, 127).cast_unsigned() & 0xff,
        ChannelType::S16 => signed.clamp(-32768, 32767).cast_unsigned() & 0xffff,
        ChannelType::U32 | ChannelType::S32 | ChannelType::F32 => word,
        ChannelType::F16 => num::to_f16(float),
        ChannelType::Unorm8 => scaled(0.0, 255.0),
        ChannelType::Unorm16 => scaled(0.0, 65535.0),
        ChannelType::Snorm8 => scaled(-1.0, 127.0) & 0xff,
        ChannelType::Snorm16 => scaled(-1.0, 32767.0) & 0xffff,
    }
}
