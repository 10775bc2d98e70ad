//! The documents of one file of the folder. A document is parsed again only if its text changes.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::Arc,
    thread,
};

use twox_hash::XxHash3_128;

use super::{
    condition::DocumentLocation,
    documents::{DocumentText, split},
    parse::{Parsed, Wanted, parse},
};

/// Minimum number of documents for which [`parse_all`] uses threads.
const PARALLEL_THRESHOLD: usize = 64;

/// A file of the folder, as of its last read.
#[derive(Debug, Default)]
pub(super) struct File {
    pub(super) documents: Vec<Document>,
    /// Why the last read failed; `documents` are then those of the last successful read. `None` if the last read
    /// succeeded.
    pub(super) unreadable: Option<String>,
    /// Whether another process had the file open for writing, so that more text may follow.
    pub(super) is_draft: bool,
}

#[derive(Debug)]
pub(super) struct Document {
    /// Id of the document within the folder. It stays while the text is the same; no other document ever gets it.
    pub(super) id: u64,
    digest: u128,
    /// Number of the line on which the document's text starts, from 1.
    pub(super) first_line: usize,
    /// Number of the line on which the document's content starts, from 1.
    line: usize,
    pub(super) parsed: Arc<Parsed>,
}

impl File {
    /// Whether the file may define objects of unknown names: a part of it is unreadable or still being written.
    pub(super) fn is_obscure(&self) -> bool {
        self.unreadable.is_some()
            || self.is_draft
            || self.documents.iter().any(|document| !document.parsed.errors.is_empty())
    }

    /// The location within the file of the document at `index`.
    pub(super) fn location(&self, index: usize) -> DocumentLocation {
        DocumentLocation {
            number: index + 1,
            line: self.documents.get(index).map_or(1, |document| document.line),
        }
    }
}

/// The text of a file, split into documents, with a digest of each.
pub(super) struct Text<'a> {
    documents: Vec<(u128, DocumentText<'a>)>,
}

impl<'a> Text<'a> {
    pub(super) fn new(text: &'a str) -> Self {
        let digest = |document: DocumentText<'a>| (XxHash3_128::oneshot(document.text.as_bytes()), document);
        Self { documents: split(text).into_iter().map(digest).collect() }
    }

    /// Digest and text of the documents that `old` does not contain.
    pub(super) fn news(&self, old: Option<&File>) -> Vec<(u128, &'a str)> {
        let old = old.map_or(&[][..], |file| &file.documents);
        let (start, end) = self.common_ends(old);
        let known: HashSet<u128> =
            old[start..old.len() - end].iter().map(|document| document.digest).collect();
        let middle = &self.documents[start..self.documents.len() - end];
        let is_new = |(digest, _): &&(u128, DocumentText<'a>)| !known.contains(digest);
        middle.iter().filter(is_new).map(|(digest, document)| (*digest, document.text)).collect()
    }

    /// Number of documents at the start that equal those at the start of `old`; and, of the rest, number of documents
    /// at the end that equal those at the end of `old`.
    fn common_ends(&self, old: &[Document]) -> (usize, usize) {
        let same = |(old, new): &(&Document, &(u128, DocumentText<'_>))| old.digest == new.0;
        let start = old.iter().zip(&self.documents).take_while(same).count();
        let rest = old[start..].iter().rev().zip(self.documents[start..].iter().rev());
        (start, rest.take_while(same).count())
    }
}

/// How a new text has changed the documents of a file.
#[derive(Debug, Default)]
pub(super) struct Difference {
    pub(super) removed: Vec<Document>,
    /// Ids of the new documents.
    pub(super) added: Vec<u64>,
    /// Ids of documents that stay, but whose order may have changed.
    pub(super) moved: Vec<u64>,
}

impl File {
    /// Applies a new text. `parsed` has the documents of [`Text::news`] by their digest. New documents get the ids
    /// after `next_id`, the last id that was given.
    pub(super) fn update(
        &mut self,
        text: &Text<'_>,
        parsed: &HashMap<u128, Arc<Parsed>>,
        next_id: &mut u64,
        wanted: Wanted,
    ) -> Difference {
        self.unreadable = None;
        let (start, end) = text.common_ends(&self.documents);
        let old_middle = start..self.documents.len() - end;
        let new_middle = &text.documents[start..text.documents.len() - end];
        let mut difference = Difference::default();
        let mut pool: BTreeMap<u128, Vec<Document>> = BTreeMap::new();
        for document in self.documents.drain(old_middle) {
            pool.entry(document.digest).or_default().push(document);
        }
        let mut middle = Vec::with_capacity(new_middle.len());
        for (digest, text) in new_middle {
            let kept = pool.get_mut(digest).and_then(Vec::pop);
            let list = if kept.is_some() { &mut difference.moved } else { &mut difference.added };
            let document = kept.unwrap_or_else(|| {
                *next_id += 1;
                let parsed =
                    parsed.get(digest).cloned().unwrap_or_else(|| Arc::new(parse(text.text, wanted)));
                Document { id: *next_id, digest: *digest, first_line: 0, line: 0, parsed }
            });
            list.push(document.id);
            middle.push(document);
        }
        self.documents.splice(start..start, middle);
        for (document, (_, text)) in self.documents.iter_mut().zip(&text.documents) {
            (document.first_line, document.line) = (text.first_line, text.line);
        }
        difference.removed = pool.into_values().flatten().collect();
        difference
    }
}

/// Parses documents, given by digest and text; many of them with one thread per processor.
pub(super) fn parse_all(documents: &[(u128, &str)], wanted: Wanted) -> HashMap<u128, Arc<Parsed>> {
    let parse_some = |documents: &[(u128, &str)]| -> Vec<(u128, Arc<Parsed>)> {
        documents.iter().map(|(digest, text)| (*digest, Arc::new(parse(text, wanted)))).collect()
    };
    let threads = thread::available_parallelism().map_or(1, usize::from);
    if threads == 1 || documents.len() < PARALLEL_THRESHOLD {
        return parse_some(documents).into_iter().collect();
    }
    thread::scope(|scope| {
        let share = documents.len().div_ceil(threads);
        let workers: Vec<_> =
            documents.chunks(share).map(|share| scope.spawn(move || parse_some(share))).collect();
        let results = workers.into_iter().map(|worker| match worker.join() {
            Ok(parsed) => parsed,
            Err(panic) => std::panic::resume_unwind(panic),
        });
        results.flatten().collect()
    })
}
