//! The initialisers of variables.

use super::{Parser, Res};
use crate::ptx::lex::Tok;
use crate::ptx::tree::Init;

impl<'a> Parser<'a> {
    /// Parses `{ … }` for dimension `level`. Returns the number of elements of that dimension.
    pub(super) fn init_list(
        &mut self,
        dims: &[u64],
        level: usize,
        base: u64,
        out: &mut Vec<(u64, Init<'a>)>,
    ) -> Res<u64> {
        self.expect(b'{')?;
        let stride: u64 = dims[level + 1..].iter().fold(1u64, |a, &b| a.saturating_mul(b));
        let mut index = 0u64;
        while !self.eat(b'}') {
            if dims[level] != 0 && index >= dims[level] {
                return self.fail("too many initialisers");
            }
            let at = base.saturating_add(index.saturating_mul(stride));
            if self.peek() == Tok::Punct(b'{') && level + 1 < dims.len() {
                self.init_list(dims, level + 1, at, out)?;
                index += 1;
            } else if level + 1 < dims.len() {
                return self.unexpected("'{'");
            } else {
                let value = self.init_value()?;
                out.push((at, value));
                index += 1;
            }
            if !self.eat(b',') && self.peek() != Tok::Punct(b'}') {
                return self.unexpected("',' or '}'");
            }
        }
        Ok(index)
    }

    pub(super) fn init_value(&mut self) -> Res<Init<'a>> {
        let neg = self.peek() == Tok::Punct(b'-');
        match if neg { self.peek_at(1) } else { self.peek() } {
            Tok::F32(bits) => {
                self.pos += usize::from(neg);
                self.next();
                Ok(Init::F32(if neg { bits ^ (1 << 31) } else { bits }))
            }
            Tok::F64(bits) => {
                self.pos += usize::from(neg);
                self.next();
                Ok(Init::F64(if neg { bits ^ (1 << 63) } else { bits }))
            }
            Tok::Int(mask) if !neg && self.peek_at(1) == Tok::Punct(b'(') => {
                self.next();
                self.next();
                let (name, offset) = self.init_symbol()?;
                self.expect(b')')?;
                Ok(Init::Symbol { name, offset, mask: Some(mask) })
            }
            Tok::Ident(_) if !neg => {
                let (name, offset) = self.init_symbol()?;
                Ok(Init::Symbol { name, offset, mask: None })
            }
            _ => Ok(Init::Int(self.constant(0)?)),
        }
    }

    fn init_symbol(&mut self) -> Res<(&'a str, i64)> {
        let mut name = self.ident()?;
        if name == "generic" && self.eat(b'(') {
            name = self.ident()?;
            self.expect(b')')?;
        }
        let offset = self.offset()?;
        Ok((name, offset))
    }
}
