//! `ldmatrix`, `stmatrix`, `movmatrix`, `mma` and `wmma`: converts the fragments of 32 lanes to small matrices and back.
//!
//! The ISA fixes the layout of `mma` fragments; [`place`] computes it. The layout of `wmma` fragments is opaque; here lane and
//! element count through the matrix in row order, twice if a fragment is twice as large as its share.

#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    reason = "elements are bits"
)]

use super::Fail;
use super::alu::Small;
use super::mem::{self, Ranges, Spaces};
use super::num;
use crate::api::FaultKind;
use crate::ir::{Inst, Op, flag};
use crate::ptx::{Space, Ty};
use crate::regs::Frame;

/// An operand of a matrix product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Part {
    A,
    B,
    C,
}

/// The extents of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ProductShape {
    pub(crate) m: u32,
    pub(crate) n: u32,
    pub(crate) k: u32,
}

/// Bits of an element in a fragment.
pub(crate) fn bits(ty: Ty) -> u32 {
    match ty {
        Ty::B1 => 1,
        Ty::S4 | Ty::U4 => 4,
        Ty::F64 => 64,
        Ty::Tf32 => 32,
        other => other.bytes() * 8,
    }
}

const TYPES: [Ty; 15] = [
    Ty::F16,
    Ty::Bf16,
    Ty::Tf32,
    Ty::F32,
    Ty::F64,
    Ty::S8,
    Ty::U8,
    Ty::S4,
    Ty::U4,
    Ty::B1,
    Ty::S32,
    Ty::B16,
    Ty::B32,
    Ty::E4m3,
    Ty::E5m2,
];

impl ProductShape {
    pub(crate) fn parse(word: &str) -> Option<ProductShape> {
        let rest = word.strip_prefix('m')?;
        let (m, rest) = rest.split_once('n')?;
        let (n, k) = rest.split_once('k')?;
        let number = |s: &str| s.parse::<u32>().ok().filter(|v| (1..=256).contains(v));
        Some(ProductShape { m: number(m)?, n: number(n)?, k: number(k)? })
    }

    /// Rows and columns of one operand.
    pub(crate) fn extent(self, part: Part) -> (u32, u32) {
        match part {
            Part::A => (self.m, self.k),
            Part::B => (self.k, self.n),
            Part::C => (self.m, self.n),
        }
    }

    /// True if the ISA defines a product of these types.
    pub(crate) fn computes(a: Ty, b: Ty, c: Ty, d: Ty) -> bool {
        let small = |t: Ty| matches!(t, Ty::S8 | Ty::U8);
        let tiny = |t: Ty| matches!(t, Ty::S4 | Ty::U4);
        match (a, b) {
            (Ty::F16, Ty::F16) => matches!(c, Ty::F16 | Ty::F32) && matches!(d, Ty::F16 | Ty::F32),
            (Ty::Bf16, Ty::Bf16) | (Ty::Tf32, Ty::Tf32) => c == Ty::F32 && d == Ty::F32,
            (Ty::F64, Ty::F64) => c == Ty::F64 && d == Ty::F64,
            (Ty::B1, Ty::B1) => c == Ty::S32 && d == Ty::S32,
            (Ty::E4m3 | Ty::E5m2, Ty::E4m3 | Ty::E5m2) => c == d && matches!(d, Ty::F16 | Ty::F32),
            (a, b) => ((small(a) && small(b)) || (tiny(a) && tiny(b))) && c == Ty::S32 && d == Ty::S32,
        }
    }

    /// True if `mma.sync.aligned` has this combination with the regular fragment layout.
    pub(crate) fn mma_takes(self, a: Ty, b: Ty, c: Ty, d: Ty) -> bool {
        let k = match (a, self.m) {
            (Ty::F16 | Ty::Bf16, 16) => self.k == 8 || self.k == 16,
            (Ty::Tf32, 16) => self.k == 4 || self.k == 8,
            (Ty::S8 | Ty::U8 | Ty::E4m3 | Ty::E5m2, 16) => self.k == 16 || self.k == 32,
            (Ty::S8 | Ty::U8, 8) => self.k == 16,
            (Ty::S4 | Ty::U4, 16) => self.k == 32 || self.k == 64,
            (Ty::S4 | Ty::U4, 8) => self.k == 32,
            (Ty::B1, 16) => self.k == 128 || self.k == 256,
            (Ty::B1, 8) => self.k == 128,
            (Ty::F64, 8) => self.k == 4,
            _ => false,
        };
        k && self.n == 8 && Self::computes(a, b, c, d)
    }

    /// The extents of the fragments if A is sparse: half of its elements are stored, as in a product of half the depth.
    pub(crate) fn stored(self) -> ProductShape {
        ProductShape { k: self.k / 2, ..self }
    }

    /// True if `mma.sp.sync.aligned` has this combination.
    pub(crate) fn sparse_mma_takes(self, a: Ty, b: Ty, c: Ty, d: Ty) -> bool {
        let narrow = matches!(a, Ty::E4m3 | Ty::E5m2) && (self.k != 64 || d != Ty::F32);
        let whole = self.m == 16 && self.k.is_multiple_of(2);
        whole && a != Ty::B1 && c == d && !narrow && self.stored().mma_takes(a, b, c, d)
    }

    /// The number of sparsity selectors: sets of threads of which one holds the positions of the stored elements.
    pub(crate) fn selectors(self, a: Ty) -> u8 {
        let words = self.k / 2 * bits(a) / 32;
        match (bits(a) >= 16, words) {
            (true, 4) => 4,
            (true, _) | (false, 4) => 2,
            (false, _) => 1,
        }
    }

    /// Encodes everything that the executor needs beside the types of d and a.
    pub(crate) fn encode(self, b: Ty, c: Ty) -> i64 {
        let index = |t: Ty| TYPES.iter().position(|x| *x == t).unwrap_or(0) as i64;
        i64::from(self.m)
            | i64::from(self.n) << 10
            | i64::from(self.k) << 20
            | index(b) << 32
            | index(c) << 40
    }

    fn decode(v: i64) -> (ProductShape, Ty, Ty) {
        let field = |at: u32| (v >> at & 0x3ff) as u32;
        let ty = |at: u32| TYPES[(v >> at & 0xff) as usize % TYPES.len()];
        (ProductShape { m: field(0), n: field(10), k: field(20) }, ty(32), ty(40))
    }
}

/// Row and column of element `index` of a lane.
fn place(shape: ProductShape, part: Part, ty: Ty, lane: u32, index: u32) -> (u32, u32) {
    let (group, thread) = (lane / 4, lane % 4);
    if part == Part::C {
        return (group + index / 2 * 8, thread * 2 + index % 2);
    }
    let per = (32 / bits(ty)).max(1);
    let (register, j) = (index / per, index % per);
    if part == Part::B {
        return (thread * per + j + register * 4 * per, group);
    }
    let halves = shape.m / 8;
    (group + register % halves * 8, thread * per + j + register / halves * 4 * per)
}

/// An operand as a matrix in row order.
struct Matrix {
    columns: u32,
    values: Vec<u64>,
}

struct View<'a> {
    shape: ProductShape,
    opaque: bool,
    frame: &'a Frame,
}

impl View<'_> {
    /// Calls `f` with position, lane, slot and bit of every element of a fragment.
    fn each(&self, part: Part, ty: Ty, slots: &[u32], mut f: impl FnMut(usize, usize, u32, u32)) {
        let (rows, columns) = self.shape.extent(part);
        let total = rows * columns;
        let register = if ty == Ty::F64 { 64 } else { 32 };
        let per = register / bits(ty);
        let elements = slots.len() as u32 * per;
        for lane in 0..32u32 {
            for index in 0..elements {
                let at = if self.opaque {
                    (lane * elements + index) % total
                } else {
                    let (row, column) = place(self.shape, part, ty, lane, index);
                    row * columns + column
                };
                if let Some(&slot) = slots.get((index / per) as usize) {
                    f(at as usize, lane as usize, slot, index % per * bits(ty));
                }
            }
        }
    }

    fn gather(&self, part: Part, ty: Ty, slots: &[u32]) -> Matrix {
        let (rows, columns) = self.shape.extent(part);
        let mut values = vec![0u64; (rows * columns) as usize];
        self.each(part, ty, slots, |at, lane, slot, bit| {
            let v = self.frame.bits(slot, lane, ty == Ty::F64) >> bit;
            if let Some(to) = values.get_mut(at) {
                *to = num::zext(v, bits(ty));
            }
        });
        Matrix { columns, values }
    }

    fn scatter(&self, ty: Ty, slots: &[u32], values: &[u64]) {
        let width = bits(ty);
        self.each(Part::C, ty, slots, |at, lane, slot, bit| {
            let v = values.get(at).copied().unwrap_or(0);
            if width >= 32 {
                self.frame.set_bits(slot, lane, width == 64, v);
            } else {
                let old: u32 = self.frame.get(slot, lane);
                let mask = ((1u32 << width) - 1) << bit;
                self.frame.set(slot, lane, (old & !mask) | ((v as u32) << bit & mask));
            }
        });
    }
}

fn float(ty: Ty, v: u64) -> f32 {
    match ty {
        Ty::F16 => num::from_f16(v as u32),
        Ty::Bf16 => num::from_bf16(v as u32),
        Ty::E4m3 | Ty::E5m2 => Small::of(ty).value(v as u32),
        // tf32 ignores the low 13 bits.
        Ty::Tf32 => f32::from_bits(v as u32 & !0x1fff),
        _ => f32::from_bits(v as u32),
    }
}

fn integer(ty: Ty, v: u64) -> i64 {
    let n = bits(ty);
    if ty.signed() { num::sext(v, n) } else { v as i64 }
}

/// The next list of slots in `extra`.
fn list<'a>(extra: &'a [u32], at: &mut usize) -> &'a [u32] {
    let len = extra.get(*at).copied().unwrap_or(0) as usize;
    let out = extra.get(*at + 1..*at + 1 + len).unwrap_or(&[]);
    *at += 1 + len;
    out
}

/// The columns of the stored elements of a sparse A, in row order.
///
/// Four bits of the metadata describe a chunk of a row. A chunk has two elements, of which one is stored, if an element has 32 bits; four,
/// of which two are stored; or eight, of which two pairs are stored, if an element has four bits.
fn stored_columns(frame: &Frame, shape: ProductShape, ty: Ty, slot: u32, selector: u32) -> Vec<usize> {
    let stored = shape.stored();
    let per = match bits(ty) {
        32 => 1,
        4 => 4,
        _ => 2,
    };
    let chunks = stored.k / per;
    let column = |row: u32, at: u32| {
        let (chunk, n) = (at / per, at % per);
        let (thread, bit) = if bits(ty) >= 16 {
            // A word has four chunks of one row, and of the eighth row below it.
            (selector * (chunks / 4) + chunk / 4, row / 8 * 16 + chunk % 4 * 4)
        } else {
            // A word has eight chunks of one row.
            (selector * 2 + chunk / 8 * 2 + row / 8, chunk % 8 * 4)
        };
        let word: u32 = frame.get(slot, (row % 8 * 4 + thread % 4) as usize);
        let index = |n: u32| word >> (bit + n * 2) & 3;
        match per {
            // The position counts in halves of an element.
            1 => chunk * 2 + index(0) / 2,
            4 => chunk * 8 + index(n / 2) * 2 + n % 2,
            _ => chunk * 4 + index(n),
        }
    };
    (0..stored.m).flat_map(|row| (0..stored.k).map(move |at| column(row, at) as usize)).collect()
}

fn product(frame: &Frame, i: &Inst, extra: &[u32]) {
    let (shape, bt, ct) = ProductShape::decode(i.imm);
    let (dt, at) = (i.ty, i.sty);
    let mut cursor = i.e as usize;
    let d = list(extra, &mut cursor);
    let (a, b, c) = (list(extra, &mut cursor), list(extra, &mut cursor), list(extra, &mut cursor));
    let metadata = list(extra, &mut cursor).first();
    let view = View { shape, opaque: i.has(flag::THIRD), frame };
    let a_view = View { shape: if metadata.is_some() { shape.stored() } else { shape }, ..view };
    let columns = metadata.map(|slot| stored_columns(frame, shape, at, *slot, i.n.into()));
    let (a, b, c) = (a_view.gather(Part::A, at, a), view.gather(Part::B, bt, b), view.gather(Part::C, ct, c));
    // The depth of the stored elements of A, and the row of B for each of them.
    let (m, n, k) = (shape.m as usize, shape.n as usize, a_view.shape.k as usize);
    let b_row = |row: usize, j: usize| columns.as_ref().map_or(j, |columns| columns[row * k + j]);
    debug_assert!(a.columns as usize == k && b.columns as usize == n && c.columns as usize == n);
    let mut out = vec![0u64; m * n];
    if at == Ty::F64 {
        for row in 0..m {
            for column in 0..n {
                let mut acc = f64::from_bits(c.values[row * n + column]);
                for j in 0..k {
                    acc = f64::from_bits(a.values[row * k + j])
                        .mul_add(f64::from_bits(b.values[j * n + column]), acc);
                }
                out[row * n + column] = acc.to_bits();
            }
        }
    } else if matches!(at, Ty::F16 | Ty::Bf16 | Ty::Tf32 | Ty::E4m3 | Ty::E5m2) {
        let b: Vec<f32> = b.values.iter().map(|&v| float(bt, v)).collect();
        let mut acc = vec![0f32; n];
        for row in 0..m {
            for (x, &v) in acc.iter_mut().zip(&c.values[row * n..(row + 1) * n]) {
                *x = float(ct, v);
            }
            for j in 0..k {
                let x = float(at, a.values[row * k + j]);
                let start = b_row(row, j) * n;
                for (sum, y) in acc.iter_mut().zip(&b[start..start + n]) {
                    *sum += x * y;
                }
            }
            for (to, &x) in out[row * n..(row + 1) * n].iter_mut().zip(&acc) {
                *to = u64::from(if dt == Ty::F16 { num::to_f16(x) } else { num::canon(x).to_bits() });
            }
        }
    } else {
        for row in 0..m {
            for column in 0..n {
                let mut acc = num::sext(c.values[row * n + column], 32);
                for j in 0..k {
                    let (x, y) = (a.values[row * k + j], b.values[b_row(row, j) * n + column]);
                    acc += match i.sub {
                        1 => (x ^ y) as i64,
                        2 => (x & y) as i64,
                        _ => integer(at, x) * integer(bt, y),
                    };
                }
                let acc =
                    if i.has(flag::SAT) { acc.clamp(i64::from(i32::MIN), i64::from(i32::MAX)) } else { acc };
                out[row * n + column] = num::zext(acc as u64, 32);
            }
        }
    }
    view.scatter(dt, d, &out);
}

/// Marks the four products of m8n8k4 in [`Inst::sub`].
pub(crate) const FOUR_PRODUCTS: u8 = 4;

/// Executes four products of 8x4 and 4x8 matrices. Thread `t` of a product is a lane of the lower half of the warp if it is below 4.
fn four_products(frame: &Frame, i: &Inst, extra: &[u32]) {
    let (_, _, ct) = ProductShape::decode(i.imm);
    let mut cursor = i.e as usize;
    let d = list(extra, &mut cursor);
    let (a, b, c) = (list(extra, &mut cursor), list(extra, &mut cursor), list(extra, &mut cursor));
    let half = |slots: &[u32], lane: usize, n: usize| {
        let word: u32 = slots.get(n / 2).map_or(0, |slot| frame.get(*slot, lane));
        num::from_f16(word >> (n % 2 * 16) & 0xffff)
    };
    // Row and column of element `n` of a sum.
    let place = |ty: Ty, t: usize, n: usize| match ty {
        Ty::F16 => (t, n),
        _ => ((t & 1) + (n & 2) + t / 4 * 4, (n & 4) + (t & 2) + (n & 1)),
    };
    for product in 0..4 {
        let lane = |t: usize| product * 4 + t % 4 + t / 4 * 16;
        let (mut x, mut y, mut sums) = ([[0f32; 4]; 8], [[0f32; 8]; 4], [[0f32; 8]; 8]);
        for t in 0..8 {
            for n in 0..4 {
                let (row, column) = if i.has(flag::LAYOUT_A_COL) { (n + t / 4 * 4, t % 4) } else { (t, n) };
                x[row][column] = half(a, lane(t), n);
                let (row, column) = if i.has(flag::TRANSPOSE) { (n, t) } else { (t % 4, n + t / 4 * 4) };
                y[row][column] = half(b, lane(t), n);
            }
            for n in 0..8 {
                let (row, column) = place(ct, t, n);
                sums[row][column] = match ct {
                    Ty::F16 => half(c, lane(t), n),
                    _ => c.get(n).map_or(0.0, |slot| frame.get(*slot, lane(t))),
                };
            }
        }
        for (row, sums) in sums.iter_mut().enumerate() {
            for (column, sum) in sums.iter_mut().enumerate() {
                *sum = (0..4).fold(*sum, |sum, j| sum + x[row][j] * y[j][column]);
            }
        }
        for t in 0..8 {
            let value = |n: usize| {
                let (row, column) = place(i.ty, t, n);
                sums[row][column]
            };
            for (n, slot) in d.iter().enumerate() {
                let word = if i.ty == Ty::F16 {
                    num::to_f16(value(2 * n)) | num::to_f16(value(2 * n + 1)) << 16
                } else {
                    num::canon(value(n)).to_bits()
                };
                frame.set(*slot, lane(t), word);
            }
        }
    }
}

fn base(frame: &Frame, i: &Inst, lane: usize) -> u64 {
    if i.has(flag::ADDR32) {
        u64::from(frame.get::<u32>(i.a, lane)).wrapping_add_signed(i.imm) & 0xffff_ffff
    } else {
        frame.get::<u64>(i.a, lane).wrapping_add_signed(i.imm)
    }
}

fn wmma_memory(
    spaces: &Spaces<'_>,
    ranges: &mut Ranges,
    frame: &Frame,
    i: &Inst,
    extra: &[u32],
    mask: u32,
) -> Result<(), Fail> {
    let lane = mask.trailing_zeros() as usize;
    let start = base(frame, i, lane);
    let stride = u64::from(frame.get::<u32>(i.b, lane));
    let mut cursor = i.e as usize;
    let extent = list(extra, &mut cursor);
    let slots = list(extra, &mut cursor);
    let (rows, columns) = (extent.first().copied().unwrap_or(1), extent.get(1).copied().unwrap_or(1));
    let column_order = i.has(flag::LAYOUT_A_COL);
    let width = u64::from(bits(i.ty));
    // All parts are accessed in the same way: the shape only gives the size.
    let shape = ProductShape { m: rows, n: columns, k: columns };
    let view = View { shape, opaque: true, frame };
    let address = |at: usize| {
        let (row, column) = (at as u64 / u64::from(columns), at as u64 % u64::from(columns));
        let index = if column_order { column * stride + row } else { row * stride + column };
        let bit = index * width;
        (start.wrapping_add(bit / 8), (bit % 8) as u32)
    };
    let mut result = Ok(());
    if i.op == Op::WmmaLoad {
        view.each(Part::C, i.ty, slots, |at, lane, slot, bit| {
            if result.is_err() {
                return;
            }
            let (addr, sub) = address(at);
            match mem::peek(spaces, ranges, i.space, addr, (width / 8).max(1) as u32, lane) {
                Ok(v) => {
                    let v = num::zext(v >> sub, width as u32);
                    if width >= 32 {
                        frame.set_bits(slot, lane, width == 64, v);
                    } else {
                        let old: u32 = frame.get(slot, lane);
                        let keep = !(((1u32 << width) - 1) << bit);
                        frame.set(slot, lane, (old & keep) | (v as u32) << bit);
                    }
                }
                Err(fail) => result = Err(fail),
            }
        });
    } else {
        view.each(Part::C, i.ty, slots, |at, lane, slot, bit| {
            if result.is_err() {
                return;
            }
            let (addr, _) = address(at);
            let v = num::zext(frame.bits(slot, lane, width == 64) >> bit, width as u32);
            result = mem::poke(spaces, ranges, i.space, addr, (width / 8).max(1) as u32, lane, v);
        });
    }
    result
}

fn load_matrix(
    spaces: &Spaces<'_>,
    ranges: &mut Ranges,
    frame: &Frame,
    i: &Inst,
    extra: &[u32],
) -> Result<(), Fail> {
    let mut cursor = i.e as usize;
    let slots = list(extra, &mut cursor);
    let mut out = [[0u32; 32]; 4];
    for (n, words) in out.iter_mut().enumerate().take(slots.len()) {
        let mut halves = [[0u16; 8]; 8];
        for (row, to) in halves.iter_mut().enumerate() {
            let lane = n * 8 + row;
            let addr = base(frame, i, lane);
            if !addr.is_multiple_of(16) {
                return Err(Fail::new(FaultKind::Misaligned, lane, addr));
            }
            for (column, half) in to.iter_mut().enumerate() {
                *half = mem::peek(spaces, ranges, i.space, addr + 2 * column as u64, 2, lane)? as u16;
            }
        }
        *words = spread(&halves, i.has(flag::TRANSPOSE));
    }
    for (slot, words) in slots.iter().zip(&out) {
        frame.store(*slot, words);
    }
    Ok(())
}

fn store_matrix(
    spaces: &Spaces<'_>,
    ranges: &mut Ranges,
    frame: &Frame,
    i: &Inst,
    extra: &[u32],
) -> Result<(), Fail> {
    let mut cursor = i.e as usize;
    let slots = list(extra, &mut cursor);
    for (n, slot) in slots.iter().enumerate() {
        let words: [u32; 32] = frame.load(*slot);
        for row in 0..8 {
            let lane = n * 8 + row;
            let addr = base(frame, i, lane);
            if !addr.is_multiple_of(16) {
                return Err(Fail::new(FaultKind::Misaligned, lane, addr));
            }
            for column in 0..8 {
                let (r, c) = if i.has(flag::TRANSPOSE) { (column, row) } else { (row, column) };
                let half = words[r * 4 + c / 2] >> (c % 2 * 16) & 0xffff;
                mem::poke(spaces, ranges, i.space, addr + 2 * column as u64, 2, lane, u64::from(half))?;
            }
        }
    }
    Ok(())
}

/// Spreads an 8x8 matrix of halves over the registers of 32 lanes.
fn spread(halves: &[[u16; 8]; 8], transpose: bool) -> [u32; 32] {
    core::array::from_fn(|lane| {
        let (row, column) = (lane / 4, lane % 4 * 2);
        let at =
            |j: usize| u32::from(if transpose { halves[column + j][row] } else { halves[row][column + j] });
        at(0) | at(1) << 16
    })
}

fn move_matrix(frame: &Frame, i: &Inst) {
    let words: [u32; 32] = frame.load(i.a);
    let mut halves = [[0u16; 8]; 8];
    for (lane, word) in words.iter().enumerate() {
        halves[lane / 4][lane % 4 * 2] = *word as u16;
        halves[lane / 4][lane % 4 * 2 + 1] = (*word >> 16) as u16;
    }
    frame.store(i.d, &spread(&halves, true));
}

/// Executes a matrix instruction for a whole warp.
#[inline(never)]
pub(crate) fn execute(
    spaces: &Spaces<'_>,
    ranges: &mut Ranges,
    frame: &Frame,
    i: &Inst,
    extra: &[u32],
    mask: u32,
) -> Result<(), Fail> {
    match i.op {
        Op::LdMatrix if i.sub == 1 => move_matrix(frame, i),
        Op::LdMatrix if i.sub == 2 => store_matrix(spaces, ranges, frame, i, extra)?,
        Op::LdMatrix => load_matrix(spaces, ranges, frame, i, extra)?,
        Op::Mma if i.sub == FOUR_PRODUCTS => four_products(frame, i, extra),
        Op::Mma => product(frame, i, extra),
        _ => wmma_memory(spaces, ranges, frame, i, extra, mask)?,
    }
    debug_assert!(i.space != Space::Const);
    Ok(())
}
