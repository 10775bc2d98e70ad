//! The documents of a YAML stream, found in the text without parsing it.
//!
//! This is possible because a line that begins with the marker `---` or `...` ends a document wherever it occurs (YAML
//! 1.2.2 §9.1.2). So a syntax error affects only its own document, and an unchanged document needs no parsing.

use memchr::{memchr_iter, memmem};

/// One document of a file, as text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DocumentText<'a> {
    /// The document's text, from its marker line (if it has one) up to the next marker.
    pub(super) text: &'a str,
    /// Number of the line of the file on which `text` starts, from 1.
    pub(super) first_line: usize,
    /// Number of the line of the file on which the content starts, after the marker, blank lines and comments; from 1.
    pub(super) line: usize,
}

/// Splits a YAML stream at its document markers. Documents without content are left out.
pub(super) fn split(text: &str) -> Vec<DocumentText<'_>> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let mut documents = Vec::new();
    let (mut start, mut first_line) = (0, 1);
    for end in marker_lines(text).chain([text.len()]) {
        let chunk = &text[start..end];
        if let Some(line) = content_line(chunk) {
            documents.push(DocumentText { text: chunk, first_line, line: first_line + line });
        }
        first_line += memchr_iter(b'\n', chunk.as_bytes()).count();
        start = end;
    }
    documents
}

/// Byte offsets of the lines with document markers, other than the first line.
fn marker_lines(text: &str) -> impl Iterator<Item = usize> {
    let bytes = text.as_bytes();
    let is_marker = move |newline: usize| {
        bytes.get(newline + 4).is_none_or(u8::is_ascii_whitespace).then_some(newline + 1)
    };
    let mut offsets: Vec<usize> = memmem::find_iter(bytes, b"\n---")
        .chain(memmem::find_iter(bytes, b"\n..."))
        .filter_map(is_marker)
        .collect();
    offsets.sort_unstable();
    offsets.into_iter()
}

/// Index, from 0, of the first line in `chunk` that has more than a marker, a directive or a comment.
fn content_line(chunk: &str) -> Option<usize> {
    let has_content = |(index, line): (usize, &str)| {
        let content = if index == 0 { strip_marker(line) } else { line };
        let content = content.trim();
        !(content.is_empty() || content.starts_with('#') || line.starts_with('%'))
    };
    chunk.lines().enumerate().position(has_content)
}

/// The rest of a line after its document marker; the whole line if it has no marker.
fn strip_marker(line: &str) -> &str {
    let rest = line.strip_prefix("---").or_else(|| line.strip_prefix("..."));
    rest.filter(|rest| rest.is_empty() || rest.starts_with([' ', '\t', '\r'])).unwrap_or(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// For each document: the line on which its content starts, and its text without marker lines.
    fn parts(text: &str) -> Vec<(usize, String)> {
        let strip = |text: &str| {
            text.lines().filter(|line| *line != "---" && *line != "...").collect::<Vec<_>>().join("\n")
        };
        split(text).into_iter().map(|document| (document.line, strip(document.text))).collect()
    }

    #[test]
    fn file_without_markers_is_one_document() {
        assert_eq!(parts("a: 1\nb: 2\n"), [(1, "a: 1\nb: 2".into())]);
        assert_eq!(parts("a: 1"), [(1, "a: 1".into())]);
    }

    #[test]
    fn markers_separate_documents_and_lines_are_counted_from_the_top_of_the_file() {
        let text = "---\na: 1\n---\n# a comment\n\nb: 2\n---   # one more\nc: 3\n";
        assert_eq!(
            split(text).iter().map(|d| (d.first_line, d.line)).collect::<Vec<_>>(),
            [(1, 2), (3, 6), (7, 8)]
        );
    }

    #[test]
    fn empty_documents_are_ignored() {
        assert_eq!(parts(""), []);
        assert_eq!(parts("# a licence\n\n---\n---\n%YAML 1.2\n---\n...\n# the end\n"), []);
    }

    #[test]
    fn end_marker_ends_a_document() {
        assert_eq!(parts("a: 1\n...\nb: 2\n"), [(1, "a: 1".into()), (3, "b: 2".into())]);
    }

    #[test]
    fn dashes_that_are_no_marker_stay_in_the_document() {
        for text in ["a: |\n  ---\n", "a:\n----\n", "a:\n---b\n", "a:\n- - -\n", "x ---\n"] {
            assert_eq!(split(text).len(), 1, "{text:?}");
        }
    }

    #[test]
    fn content_may_start_on_the_marker_line() {
        assert_eq!(split("--- {a: 1}\n--- {b: 2}\n").iter().map(|d| d.line).collect::<Vec<_>>(), [1, 2]);
    }

    #[test]
    fn crlf_and_byte_order_mark_are_accepted() {
        assert_eq!(
            split("\u{feff}---\r\na: 1\r\n---\r\nb: 2\r\n").iter().map(|d| d.line).collect::<Vec<_>>(),
            [2, 4]
        );
    }
}
