"""Models: backbones, heads, trees and linear models; what they predict, and how they are saved."""
