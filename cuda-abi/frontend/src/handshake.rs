//! The answer to the start-up handshake of NVIDIA's CUDA runtime.
//!
//! A runtime sends the driver one challenge, three times in a row, before its first real call, and refuses to work after a wrong
//! answer. This module computes that answer, so that unmodified programs start on a remoted or a software driver. The handshake
//! protects no data and carries no secret of a user or a machine.
//!
//! The ZLUDA project published the algorithm (<https://github.com/vosen/ZLUDA>, MIT or Apache-2.0, crate `dark_api`) and deserves
//! the credit; the code here was written from a description of it and from RFC 1319 (MD2) and RFC 2104 (HMAC). MD2 and HMAC are a
//! format here, not protection: nothing else in this project may use them, and only the export tables may depend on this module.
//! Without the cargo feature `cudart-handshake` it is left out.

#![expect(
    clippy::cast_possible_truncation,
    reason = "half of a digest and a count up to 16 fit where they are put"
)]

use crate::identity::DeviceIdentity;

/// All inputs of the answer. Each field must equal the value that the process itself gets from the corresponding call.
#[derive(Debug, Clone, Copy)]
pub struct Question<'a> {
    /// Result of `cuDriverGetVersion`.
    pub driver_version: u32,
    /// First argument: the runtime's version plus the number of the question (0, 1, 2).
    pub version: u32,
    /// The process id.
    pub process: u32,
    /// Low 32 bits of the thread id, as `pthread_self` returns it.
    pub thread: u32,
    /// Address of the table `CUDART_INTERFACE`.
    pub interface_table: u64,
    /// Address of the table that contains the handshake.
    pub handshake_table: u64,
    /// Address of the function in slot 1 of that table.
    pub entry: u64,
    /// Second argument: the runtime's clock. This module reads no clock.
    pub unix_seconds: u64,
    /// Visible devices in ordinal order.
    pub devices: &'a [DeviceIdentity],
}

/// The key of the keyed digest.
const KEY: [u8; BLOCK] =
    [0x14, 0x6a, 0xdd, 0xae, 0x53, 0xa9, 0xa7, 0x52, 0xaa, 0x08, 0x41, 0x36, 0x0b, 0xf5, 0x5a, 0x9f];

/// The two words of the answer.
pub fn answer(question: &Question<'_>) -> [u64; 2] {
    match question.version % 10 {
        0 => [0x3341_181c_03cb_675c, 0x8ed3_83aa_1f4c_d1e8],
        1 => [0x1841_181c_03cb_675c, 0x8ed3_83aa_1f4c_d1e8],
        _ => {
            // Both words of the digest, read as little-endian: the low 64 bits of the whole are the first word.
            let digest = u128::from_le_bytes(digest(question));
            [0, 64].map(|shift| (digest >> shift) as u64)
        }
    }
}

/// HMAC-MD2 over the fields in order, little-endian, without padding.
fn digest(question: &Question<'_>) -> [u8; BLOCK] {
    let mut hmac = Hmac::new(&KEY);
    for word in [question.driver_version, question.version, question.process, question.thread] {
        hmac.absorb(&word.to_le_bytes());
    }
    for word in [question.interface_table, question.handshake_table, question.entry, question.unix_seconds] {
        hmac.absorb(&word.to_le_bytes());
    }
    for device in question.devices {
        hmac.absorb(&device.uuid);
        for number in [device.pci_domain, device.pci_bus, device.pci_device] {
            hmac.absorb(&number.to_le_bytes());
        }
    }
    hmac.finish()
}

/// HMAC of RFC 2104 over MD2 for a key of exactly one block.
struct Hmac {
    inner: Md2,
    outer: Md2,
}

impl Hmac {
    fn new(key: &[u8; BLOCK]) -> Self {
        let start = |mask: u8| {
            let mut hash = Md2::new();
            hash.absorb(&key.map(|byte| byte ^ mask));
            hash
        };
        Self { inner: start(0x36), outer: start(0x5c) }
    }

    fn absorb(&mut self, bytes: &[u8]) {
        self.inner.absorb(bytes);
    }

    fn finish(mut self) -> [u8; BLOCK] {
        self.outer.absorb(&self.inner.finish());
        self.outer.finish()
    }
}

/// The block and the digest of MD2, in bytes.
const BLOCK: usize = 16;

/// MD2 of RFC 1319.
struct Md2 {
    /// The digest, the current block, and the two combined.
    state: [u8; 3 * BLOCK],
    checksum: [u8; BLOCK],
    /// Bytes in the current block.
    filled: usize,
    /// The last byte of the checksum.
    last: u8,
}

impl Md2 {
    const fn new() -> Self {
        Self { state: [0; 3 * BLOCK], checksum: [0; BLOCK], filled: 0, last: 0 }
    }

    fn absorb(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.state[BLOCK + self.filled] = byte;
            self.state[2 * BLOCK + self.filled] = byte ^ self.state[self.filled];
            self.checksum[self.filled] ^= PI_SUBST[usize::from(byte ^ self.last)];
            self.last = self.checksum[self.filled];
            self.filled += 1;
            if self.filled == BLOCK {
                self.filled = 0;
                self.mix();
            }
        }
    }

    fn mix(&mut self) {
        let mut carry = 0_u8;
        for round in 0..18_u8 {
            for byte in &mut self.state {
                *byte ^= PI_SUBST[usize::from(carry)];
                carry = *byte;
            }
            carry = carry.wrapping_add(round);
        }
    }

    fn finish(mut self) -> [u8; BLOCK] {
        // A message always gets padding, a whole block if the last one is full. Each byte contains the length of the padding.
        let missing = BLOCK - self.filled;
        self.absorb(&[missing as u8; BLOCK][..missing]);
        // A copy, because absorbing the checksum changes it.
        self.absorb(&{ self.checksum });
        let mut digest = [0; BLOCK];
        digest.copy_from_slice(&self.state[..BLOCK]);
        digest
    }
}

/// The permutation of RFC 1319, derived from the digits of pi.
#[rustfmt::skip]
const PI_SUBST: [u8; 256] = [
    0x29, 0x2e, 0x43, 0xc9, 0xa2, 0xd8, 0x7c, 0x01, 0x3d, 0x36, 0x54, 0xa1, 0xec, 0xf0, 0x06, 0x13,
    0x62, 0xa7, 0x05, 0xf3, 0xc0, 0xc7, 0x73, 0x8c, 0x98, 0x93, 0x2b, 0xd9, 0xbc, 0x4c, 0x82, 0xca,
    0x1e, 0x9b, 0x57, 0x3c, 0xfd, 0xd4, 0xe0, 0x16, 0x67, 0x42, 0x6f, 0x18, 0x8a, 0x17, 0xe5, 0x12,
    0xbe, 0x4e, 0xc4, 0xd6, 0xda, 0x9e, 0xde, 0x49, 0xa0, 0xfb, 0xf5, 0x8e, 0xbb, 0x2f, 0xee, 0x7a,
    0xa9, 0x68, 0x79, 0x91, 0x15, 0xb2, 0x07, 0x3f, 0x94, 0xc2, 0x10, 0x89, 0x0b, 0x22, 0x5f, 0x21,
    0x80, 0x7f, 0x5d, 0x9a, 0x5a, 0x90, 0x32, 0x27, 0x35, 0x3e, 0xcc, 0xe7, 0xbf, 0xf7, 0x97, 0x03,
    0xff, 0x19, 0x30, 0xb3, 0x48, 0xa5, 0xb5, 0xd1, 0xd7, 0x5e, 0x92, 0x2a, 0xac, 0x56, 0xaa, 0xc6,
    0x4f, 0xb8, 0x38, 0xd2, 0x96, 0xa4, 0x7d, 0xb6, 0x76, 0xfc, 0x6b, 0xe2, 0x9c, 0x74, 0x04, 0xf1,
    0x45, 0x9d, 0x70, 0x59, 0x64, 0x71, 0x87, 0x20, 0x86, 0x5b, 0xcf, 0x65, 0xe6, 0x2d, 0xa8, 0x02,
    0x1b, 0x60, 0x25, 0xad, 0xae, 0xb0, 0xb9, 0xf6, 0x1c, 0x46, 0x61, 0x69, 0x34, 0x40, 0x7e, 0x0f,
    0x55, 0x47, 0xa3, 0x23, 0xdd, 0x51, 0xaf, 0x3a, 0xc3, 0x5c, 0xf9, 0xce, 0xba, 0xc5, 0xea, 0x26,
    0x2c, 0x53, 0x0d, 0x6e, 0x85, 0x28, 0x84, 0x09, 0xd3, 0xdf, 0xcd, 0xf4, 0x41, 0x81, 0x4d, 0x52,
    0x6a, 0xdc, 0x37, 0xc8, 0x6c, 0xc1, 0xab, 0xfa, 0x24, 0xe1, 0x7b, 0x08, 0x0c, 0xbd, 0xb1, 0x4a,
    0x78, 0x88, 0x95, 0x8b, 0xe3, 0x63, 0xe8, 0x6d, 0xe9, 0xcb, 0xd5, 0xfe, 0x3b, 0x00, 0x1d, 0x39,
    0xf2, 0xef, 0xb7, 0x0e, 0x66, 0x58, 0xd0, 0xe4, 0xa6, 0x77, 0x72, 0xf8, 0xeb, 0x75, 0x4b, 0x0a,
    0x31, 0x44, 0x50, 0xb4, 0x8f, 0xed, 0x1f, 0x1a, 0xdb, 0x99, 0x8d, 0x33, 0x9f, 0x11, 0x83, 0x14,
];

#[cfg(test)]
mod tests {
    use super::*;

    fn md2(message: &[u8]) -> u128 {
        let mut hash = Md2::new();
        hash.absorb(message);
        u128::from_be_bytes(hash.finish())
    }

    #[test]
    fn md2_matches_the_digests_of_rfc_1319() {
        assert_eq!(md2(b""), 0x8350e5a3e24c153df2275c9f80692773);
        assert_eq!(md2(b"a"), 0x32ec01ec4a6dac72c0ab96fb34c0b5d1);
        assert_eq!(md2(b"abc"), 0xda853b0d3f88d99b30283a69e6ded6bb);
        assert_eq!(md2(b"message digest"), 0xab4f496bfb2a530b219ff33031fe06b0);
        assert_eq!(md2(b"abcdefghijklmnopqrstuvwxyz"), 0x4e8ddff3650292ab5a4108c3aa47940b);
        let alphanumeric = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789";
        assert_eq!(md2(alphanumeric), 0xda33def2a42df13975352846c30338cd);
        assert_eq!(md2(&b"1234567890".repeat(8)), 0xd5976f79d83d3a0dc9806c3c66f3efd8);
    }

    #[test]
    fn md2_is_independent_of_the_split_of_the_message() {
        let message: Vec<u8> = (0..104).collect();
        for length in [0, 15, 16, 17, 48, 76, 104] {
            for cut in 0..=length {
                let mut hash = Md2::new();
                hash.absorb(&message[..cut]);
                hash.absorb(&message[cut..length]);
                assert_eq!(
                    u128::from_be_bytes(hash.finish()),
                    md2(&message[..length]),
                    "{length} cut at {cut}"
                );
            }
        }
    }

    const UUID: [u8; 16] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];

    fn device(uuid: [u8; 16], pci_bus: i32) -> DeviceIdentity {
        DeviceIdentity { uuid, pci_domain: 0, pci_bus, pci_device: 0 }
    }

    fn question(devices: &[DeviceIdentity]) -> Question<'_> {
        Question {
            driver_version: 13050,
            version: 13052,
            process: 1234,
            thread: 0x89ab_cdef,
            interface_table: 0x7f00_0000_1000,
            handshake_table: 0x7f00_0000_2000,
            entry: 0x7f00_0000_3000,
            unix_seconds: 1_700_000_000,
            devices,
        }
    }

    #[test]
    fn handshake_answers_match_known_values() {
        let reversed = UUID.map(|byte| 15 - byte);
        let devices = [device(UUID, 1), device(reversed, 2)];
        assert_eq!(answer(&question(&[])), [0xc04e_4dbf_6b29_5345, 0x358b_4540_5f43_e8d6]);
        assert_eq!(answer(&question(&devices[..1])), [0x5e9a_e56d_5cd4_69cf, 0x7098_02d5_ebca_5d1c]);
        assert_eq!(answer(&question(&devices)), [0x3214_293f_b92b_f18d, 0xb1e0_f4ee_865a_fafb]);
    }

    #[test]
    fn handshake_versions_that_end_in_0_and_1_have_fixed_answers() {
        let mut asked = question(&[]);
        asked.version = 12090;
        assert_eq!(answer(&asked), [0x3341_181c_03cb_675c, 0x8ed3_83aa_1f4c_d1e8]);
        asked.version = 12091;
        assert_eq!(answer(&asked), [0x1841_181c_03cb_675c, 0x8ed3_83aa_1f4c_d1e8]);
    }

    #[test]
    fn handshake_answer_depends_on_every_bit_of_every_field() {
        let devices = [device(UUID, 1), device(UUID.map(|byte| byte ^ 0xff), 2)];
        let base = question(&devices);
        let expected = answer(&base);
        let mut seen = std::collections::HashSet::from([expected]);
        let mut differs = |what: &str, asked: &Question<'_>| {
            assert!(seen.insert(answer(asked)), "{what} does not count");
        };
        for bit in 0..32 {
            let flip = 1_u32 << bit;
            differs("driver version", &Question { driver_version: base.driver_version ^ flip, ..base });
            differs("process", &Question { process: base.process ^ flip, ..base });
            differs("thread", &Question { thread: base.thread ^ flip, ..base });
            // A version that ends in 0 or 1 is a different question.
            if (base.version ^ flip) % 10 > 1 {
                differs("version", &Question { version: base.version ^ flip, ..base });
            }
        }
        for bit in 0..64 {
            let flip = 1_u64 << bit;
            differs("interface", &Question { interface_table: base.interface_table ^ flip, ..base });
            differs("handshake", &Question { handshake_table: base.handshake_table ^ flip, ..base });
            differs("entry", &Question { entry: base.entry ^ flip, ..base });
            differs("time", &Question { unix_seconds: base.unix_seconds ^ flip, ..base });
        }
        for index in 0..devices.len() {
            let mut with = |what: &str, change: &dyn Fn(&mut DeviceIdentity)| {
                let mut changed = devices;
                change(&mut changed[index]);
                differs(what, &Question { devices: &changed, ..base });
            };
            for bit in 0..128 {
                with("uuid", &|device| device.uuid[bit / 8] ^= 1 << (bit % 8));
            }
            for bit in 0..32 {
                with("domain", &|device| device.pci_domain ^= 1 << bit);
                with("bus", &|device| device.pci_bus ^= 1 << bit);
                with("device", &|device| device.pci_device ^= 1 << bit);
            }
        }
        differs("order of devices", &Question { devices: &[devices[1], devices[0]], ..base });
    }
}
