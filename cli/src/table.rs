//! Tables of text in columns.

use serde::Serialize;
use serde_json::Value;

use crate::api::plain;

/// Lines of cells under titles. Columns whose title begins with `>` are aligned to the right.
pub(crate) struct Table {
    rows: Vec<Vec<String>>,
    right: Vec<bool>,
}

impl Table {
    pub(crate) fn new(titles: &[&str]) -> Self {
        let right = titles.iter().map(|title| title.starts_with('>')).collect();
        let titles = titles.iter().map(|title| title.trim_start_matches('>').to_owned()).collect();
        Self { rows: vec![titles], right }
    }

    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().collect());
    }
}

impl std::fmt::Display for Table {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.right.len()).map(width).collect();
        for row in &self.rows {
            let mut line = String::new();
            for ((cell, &width), &right) in row.iter().zip(&widths).zip(&self.right) {
                if right {
                    line.push_str(&format!("{cell:>width$}  "));
                } else {
                    line.push_str(&format!("{cell:<width$}  "));
                }
            }
            writeln!(formatter, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

/// A value of the API in a cell; `-` for none.
pub(crate) fn text(value: &impl Serialize) -> String {
    match serde_json::to_value(value) {
        Ok(Value::Null) | Err(_) => "-".to_owned(),
        Ok(Value::String(text)) if text.is_empty() => "-".to_owned(),
        Ok(Value::String(text)) => plain(&text),
        Ok(other) => other.to_string(),
    }
}

/// Bytes in a suitable unit; `-` for none.
pub(crate) fn bytes(bytes: impl Into<Option<u64>>) -> String {
    let Some(bytes) = bytes.into() else { return "-".to_owned() };
    for (unit, shift) in [("TiB", 40_u32), ("GiB", 30), ("MiB", 20), ("KiB", 10)] {
        let one = 1_u64 << shift;
        if bytes >= one {
            // Tenths, rounded down: never more than there is.
            let tenths = (bytes & (one - 1)).saturating_mul(10) >> shift;
            let fraction = if tenths == 0 { String::new() } else { format!(".{tenths}") };
            return format!("{}{fraction} {unit}", bytes >> shift);
        }
    }
    format!("{bytes} B")
}

/// A limit in bytes, where 0 means no limit.
pub(crate) fn limit(limit: u64) -> String {
    if limit == 0 { "all".to_owned() } else { bytes(limit) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_columns_are_aligned_with_their_titles() {
        let mut table = Table::new(&["NAME", ">BYTES", "STATE"]);
        table.row(["a".to_owned(), "5".to_owned(), "running".to_owned()]);
        table.row(["longer".to_owned(), "12345".to_owned(), String::new()]);
        assert_eq!(table.to_string(), "NAME    BYTES  STATE\na           5  running\nlonger  12345\n");
    }

    #[test]
    fn bytes_are_shown_in_the_largest_unit_that_fits() {
        let shown = [0, 1023, 1024, 1536, (1 << 30) - 1, 1 << 30, 3 << 39].map(|number: u64| bytes(number));
        assert_eq!(shown, ["0 B", "1023 B", "1 KiB", "1.5 KiB", "1023.9 MiB", "1 GiB", "1.5 TiB"]);
        assert_eq!((bytes(None), limit(0)), ("-".to_owned(), "all".to_owned()));
        assert_eq!(text(&"\u{1b}[2J"), " [2J", "a terminal would obey it");
    }
}
