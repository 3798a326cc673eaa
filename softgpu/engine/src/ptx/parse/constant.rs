//! Constant expressions. Each level of nesting is counted, so a text cannot exhaust the stack.

use super::{MAX_DEPTH, Parser, Res};
use crate::api::LoadError;
use crate::ptx::lex::Tok;

impl Parser<'_> {
    pub(super) fn constant(&mut self, depth: u32) -> Res<u64> {
        self.binary(depth, 0)
    }

    fn operator(&self) -> Option<(u8, u32, usize)> {
        let Tok::Punct(c) = self.peek() else { return None };
        let second = self.peek_at(1);
        Some(match c {
            b'*' | b'/' | b'%' => (c, 10, 1),
            b'+' | b'-' => (c, 9, 1),
            b'<' if second == Tok::Punct(b'<') => (b'l', 8, 2),
            b'>' if second == Tok::Punct(b'>') => (b'r', 8, 2),
            b'&' if second != Tok::Punct(b'&') => (c, 5, 1),
            b'^' => (c, 4, 1),
            _ => return None,
        })
    }

    /// Precedence climbing. Leaves a `|` in place, since `%p|%q` uses it.
    fn binary(&mut self, depth: u32, least: u32) -> Res<u64> {
        if depth > MAX_DEPTH {
            return self.fail("expression too deep");
        }
        let mut left = self.unary(depth + 1)?;
        while let Some((op, precedence, width)) = self.operator() {
            if precedence < least {
                break;
            }
            for _ in 0..width {
                self.next();
            }
            let right = self.binary(depth + 1, precedence + 1)?;
            let (a, b) = (left, right);
            left = match op {
                b'*' => a.wrapping_mul(b),
                b'/' | b'%' if b == 0 => return self.fail("division by zero in a constant"),
                b'/' => a.cast_signed().wrapping_div(b.cast_signed()).cast_unsigned(),
                b'%' => a.cast_signed().wrapping_rem(b.cast_signed()).cast_unsigned(),
                b'+' => a.wrapping_add(b),
                b'-' => a.wrapping_sub(b),
                b'l' => a.checked_shl(u32::try_from(b).unwrap_or(64)).unwrap_or(0),
                b'r' => a.checked_shr(u32::try_from(b).unwrap_or(64)).unwrap_or(0),
                b'&' => a & b,
                _ => a ^ b,
            };
        }
        Ok(left)
    }

    fn unary(&mut self, depth: u32) -> Res<u64> {
        if depth > MAX_DEPTH {
            return self.fail("expression too deep");
        }
        let line = self.line();
        match self.next() {
            Tok::Int(v) => Ok(v),
            Tok::Punct(b'-') => Ok(self.unary(depth + 1)?.wrapping_neg()),
            Tok::Punct(b'+') => self.unary(depth + 1),
            Tok::Punct(b'~') => Ok(!self.unary(depth + 1)?),
            Tok::Punct(b'!') => Ok(u64::from(self.unary(depth + 1)? == 0)),
            Tok::Punct(b'(') => {
                // A cast such as `(.s64)` changes nothing at 64 bits.
                if matches!(self.peek(), Tok::Dot("s64" | "u64")) {
                    self.next();
                    self.expect(b')')?;
                    return self.unary(depth + 1);
                }
                let v = self.constant(depth + 1)?;
                self.expect(b')')?;
                Ok(v)
            }
            Tok::Ident("WARP_SZ") => Ok(32),
            // The next token may be on another line.
            _ => self.fail("expected a constant").map_err(|error: LoadError| LoadError { line, ..error }),
        }
    }
}
