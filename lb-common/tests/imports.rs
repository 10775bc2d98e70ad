//! Files of different folders of a crate never import each other in a circle, and no crate has more than 35 % of the
//! lines.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    fs,
    path::{Path, PathBuf},
};

use syn::{
    Item, ItemMod, ItemUse, Meta, UseTree, Visibility,
    visit::{self, Visit},
};

use self::{files::paths, imports_of::imports_of};

#[path = "support/files.rs"]
mod files;
#[path = "support/imports_of.rs"]
mod imports_of;

const CRATES: [&str; 9] =
    ["lb-agent", "lb-common", "lb-core", "lb-datapath", "lb-dns", "lb-ebpf", "lb-kubectl", "lb-web", "xtask"];

/// A path of names below the root of a crate, such as `["datapath", "flow"]`.
type Names = Vec<String>;

/// One file of a crate.
struct Module {
    file: PathBuf,
    /// The paths that the file's code names, from the root of the crate.
    paths: BTreeSet<Names>,
    /// The names that the file re-exports, with their paths.
    exports: BTreeMap<String, Names>,
}

#[test]
fn files_of_different_folders_import_each_other_in_no_circle() {
    for name in CRATES {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name(name).join("src");
        let modules = modules(&source);
        assert!(modules.len() > 5, "{name} has {} modules", modules.len());
        let imports = imports(&modules);
        assert!(imports.values().flatten().count() > modules.len() / 2, "{name} imports nothing");
        let circles = circles_between_folders(&modules, &imports);
        assert!(circles.is_empty(), "{name}: import circles span folders: {circles:#?}");
    }
}

#[test]
fn no_crate_has_more_than_35_percent_of_the_lines() {
    let lines = |name: &str| -> usize {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name(name);
        let sources = paths(&folder, ".rs");
        assert!(!sources.is_empty(), "{name} has no sources");
        sources.iter().map(|path| fs::read_to_string(path).expect("a source").lines().count()).sum()
    };
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("Cargo.toml");
    let manifest = fs::read_to_string(manifest).expect("the manifest of the workspace");
    let members = manifest.lines().find_map(|line| line.strip_prefix("members = ")).expect("the members");
    // A crate in the folder of another crate counts as part of that crate.
    let crates: BTreeMap<&str, usize> = members
        .split('"')
        .skip(1)
        .step_by(2)
        .filter(|member| !member.contains('/'))
        .map(|name| (name, lines(name)))
        .collect();
    assert!(crates.len() > CRATES.len(), "{crates:?}");
    let all: usize = crates.values().sum();
    for (name, lines) in crates {
        assert!(lines * 100 <= all * 35, "{name} has {lines} of {all} lines");
    }
}

#[test]
fn circle_between_folders_is_found() {
    let module = |file: &str| Module { file: file.into(), paths: BTreeSet::new(), exports: BTreeMap::new() };
    let path = |path: &str| -> Names { path.split("::").map(str::to_owned).collect() };
    let mut modules = BTreeMap::new();
    for (name, file, text) in [
        ("a", "a/mod.rs", "mod one; use crate::b::Thing;"),
        ("a::one", "a/one.rs", "#[cfg(test)] mod tests { use crate::a; }"),
        ("b", "b/mod.rs", "pub use self::two::Thing; mod two;"),
        ("b::two", "b/two.rs", "fn f() { super::super::a::one::g() }"),
        ("c", "c.rs", "use crate::a::{one, two};"),
    ] {
        modules.insert(path(name), read(module(file), &path(name), text));
    }
    let found = |modules: &_| circles_between_folders(modules, &imports(modules));
    assert_eq!(found(&modules), [] as [String; 0], "b::two imports a::one, which imports nothing");
    let text = "use super::Shared;";
    modules.insert(path("a::one"), read(module("a/one.rs"), &path("a::one"), text));
    let circle = ["a/mod.rs → b/two.rs → a/one.rs → a/mod.rs", "b/two.rs → a/one.rs → a/mod.rs → b/two.rs"];
    assert_eq!(found(&modules), circle);
}

/// All modules of a crate that have a file, except tests.
fn modules(source: &Path) -> BTreeMap<Names, Module> {
    let mut modules = BTreeMap::new();
    for path in paths(source, ".rs") {
        let file = path.strip_prefix(source).expect("a file of the crate").to_owned();
        let mut names: Names =
            file.with_extension("").iter().map(|name| name.to_string_lossy().into_owned()).collect();
        names.pop_if(|name| ["mod", "lib", "main"].contains(&name.as_str()));
        if !names.contains(&"tests".into()) {
            let text = fs::read_to_string(&path).expect("a source file");
            let module = Module { file, paths: BTreeSet::new(), exports: BTreeMap::new() };
            modules.insert(names.clone(), read(module, &names, &text));
        }
    }
    modules
}

/// Adds the paths and re-exports of the module's text.
fn read(module: Module, names: &[String], text: &str) -> Module {
    let file = syn::parse_file(text).expect("Rust");
    let mut reader = Reader { module, names };
    reader.visit_file(&file);
    reader.module
}

struct Reader<'a> {
    module: Module,
    names: &'a [String],
}

impl Reader<'_> {
    /// The path from the root of the crate, or `None` if `path` names something else, such as another crate.
    fn absolute(&self, path: &[String]) -> Option<Names> {
        let (first, rest) = path.split_first()?;
        match first.as_str() {
            "crate" => Some(rest.to_vec()),
            "self" => Some([self.names, rest].concat()),
            "super" => {
                let levels = path.iter().take_while(|name| *name == "super").count();
                let base = self.names.get(..self.names.len().checked_sub(levels)?)?;
                Some([base, &path[levels..]].concat())
            }
            _ => None,
        }
    }

    fn add_use(&mut self, tree: &UseTree, is_export: bool) {
        for (name, path) in imports_of(tree) {
            let Some(path) = self.absolute(&path) else { continue };
            if let (true, Some(name)) = (is_export, name) {
                self.module.exports.insert(name, path.clone());
            }
            self.module.paths.insert(path);
        }
    }
}

impl<'a> Visit<'a> for Reader<'_> {
    fn visit_item(&mut self, item: &'a Item) {
        let attributes = if let Item::Mod(ItemMod { attrs, .. }) = item { attrs.as_slice() } else { &[] };
        let is_test = |meta: &Meta| {
            matches!(meta, Meta::List(list)
            if list.path.is_ident("cfg") && list.tokens.to_string().starts_with("test"))
        };
        if !attributes.iter().any(|attribute| is_test(&attribute.meta)) {
            visit::visit_item(self, item);
        }
    }

    fn visit_item_use(&mut self, item: &'a ItemUse) {
        self.add_use(&item.tree, !matches!(item.vis, Visibility::Inherited));
    }

    /// Skips paths such as `pub(super)`: they import nothing.
    fn visit_visibility(&mut self, _: &'a Visibility) {}

    fn visit_path(&mut self, path: &'a syn::Path) {
        let names: Names = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        self.module.paths.extend(self.absolute(&names));
        visit::visit_path(self, path);
    }
}

/// The modules that each module imports. An item that is imported through re-exports counts for the module that defines
/// it. The declaration of a child module is no import.
fn imports(modules: &BTreeMap<Names, Module>) -> BTreeMap<&Names, BTreeSet<&Names>> {
    let of_module = |(name, module): (_, &Module)| {
        let targets = module.paths.iter().filter_map(|path| target(modules, path));
        (name, targets.filter(|target| *target != name).collect())
    };
    modules.iter().map(of_module).collect()
}

/// The module that defines what `path` names.
fn target<'a>(modules: &'a BTreeMap<Names, Module>, path: &[String]) -> Option<&'a Names> {
    let mut path = path.to_vec();
    // Every chain of re-exports is shorter than this; the limit ends a circle of re-exports.
    for _ in 0..8 {
        let length = (0..=path.len()).rev().find(|length| modules.contains_key(&path[..*length]))?;
        let (name, module) = modules.get_key_value(&path[..length])?;
        let Some(exported) = path.get(length).and_then(|item| module.exports.get(item)) else {
            return Some(name);
        };
        path = [exported, &path[length + 1..]].concat();
    }
    None
}

/// For each import between files of different folders that is part of a circle of imports: the shortest such circle, as
/// text.
fn circles_between_folders(
    modules: &BTreeMap<Names, Module>,
    imports: &BTreeMap<&Names, BTreeSet<&Names>>,
) -> Vec<String> {
    let file = |name: &Names| &modules[name].file;
    let edges = imports.iter().flat_map(|(from, targets)| targets.iter().map(|to| (*from, *to)));
    edges
        .filter(|(from, to)| file(from).parent() != file(to).parent())
        .filter_map(|(from, to)| Some([vec![from], way(imports, to, from)?].concat()))
        .map(|circle| {
            circle.iter().map(|name| file(name).display().to_string()).collect::<Vec<_>>().join(" → ")
        })
        .collect()
}

/// The shortest chain of imports from one module to another, both included.
fn way<'a>(
    imports: &BTreeMap<&'a Names, BTreeSet<&'a Names>>,
    from: &'a Names,
    to: &'a Names,
) -> Option<Vec<&'a Names>> {
    let (mut seen, mut next) = (BTreeSet::new(), VecDeque::from([vec![from]]));
    while let Some(way) = next.pop_front() {
        let last = *way.last()?;
        if last == to {
            return Some(way);
        }
        if seen.insert(last) {
            next.extend(imports[last].iter().map(|module| [way.as_slice(), &[*module]].concat()));
        }
    }
    None
}
